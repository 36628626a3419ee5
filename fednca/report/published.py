"""The numbers that the paper prints, to stand beside one's own."""

import csv
from functools import cache
from pathlib import Path

from fednca.config import Config, load_config, preset_names
from fednca.methods import create_method

PUBLISHED = Path(__file__).parent / "published.csv"
STILL_THE_PAPERS = {"variant", "text"}  # options under which a method stays the one that the paper reports


def reported(config: Config) -> dict[str, float]:
    """Return by metric what the paper reports of a run, in percent; nothing where the run is none of the paper's."""
    key = (config.data.name, config.partition.beta, config.method.name)
    if not (is_the_papers_setting(config) and is_the_papers_method(config)):
        return {}
    return {metric: value for (*others, metric), value in _table(PUBLISHED).items() if tuple(others) == key}


def is_the_papers_setting(config: Config) -> bool:
    """Tell whether clients, gamma and rounds are those of the preset with a run's dataset and beta."""

    def told(config: Config) -> tuple[object, ...]:
        return config.partition.kind, config.partition.clients, config.partition.gamma, config.train.rounds

    preset = f"{config.data.name}-{config.partition.beta:g}"
    return preset in preset_names() and told(config) == told(load_config(preset))


def is_the_papers_method(config: Config) -> bool:
    """Tell whether a run's method is the one that the paper reports: on its own learner and loss, with its defaults."""
    method = config.method
    kept = {name: value for name, value in method.options.items() if name in STILL_THE_PAPERS}
    plain = config.replace({"method.options": kept})
    own = method.learner is None and method.closing is None and method.criterion is None
    return own and create_method(config) == create_method(plain)


def published(dataset: str, beta: float, method: str, metric: str) -> float | None:
    """Return what the paper reports, in percent; None where it reports nothing."""
    return _table(PUBLISHED).get((dataset, beta, method, metric))


@cache
def _table(path: Path) -> dict[tuple[str, float, str, str], float]:
    """Read the columns dataset, beta, method, metric, value."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            (row["dataset"], float(row["beta"]), row["method"], row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
        }
