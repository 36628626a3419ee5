"""The numbers that the paper prints, to stand beside one's own."""

import csv
from functools import cache
from pathlib import Path

PUBLISHED = Path(__file__).parent / "published.csv"


def published(dataset: str, beta: float, method: str, metric: str) -> float | None:
    """Return what the paper reports, in percent; None where it reports nothing."""
    return _table(PUBLISHED).get((dataset, beta, method, metric))


@cache
def _table(path: Path) -> dict[tuple[str, float, str, str], float]:
    """Read the columns dataset, beta, method, metric, value; empty where there is no such file."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {
            (row["dataset"], float(row["beta"]), row["method"], row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
        }
