"""The paper's published numbers, to show beside our own."""

import csv
from functools import cache
from pathlib import Path

from fednca.config import Config, load_config, preset_names
from fednca.methods import create_method

PUBLISHED = Path(__file__).parent / "published.csv"
STILL_THE_PAPERS = {"variant", "text"}  # options that may be set without leaving the paper's method


def reported(config: Config) -> dict[str, float]:
    """Return the paper's values for a run by metric, in percent; empty if the run is not one of the paper's."""
    key = (config.data.name, config.partition.beta, config.method.name)
    if not (is_the_papers_setting(config) and is_the_papers_method(config)):
        return {}
    return {metric: value for (*others, metric), value in _table(PUBLISHED).items() if tuple(others) == key}


def is_the_papers_setting(config: Config) -> bool:
    """Return whether clients, gamma and rounds equal those of the preset for the run's dataset and beta."""

    def told(config: Config) -> tuple[object, ...]:
        return config.partition.kind, config.partition.clients, config.partition.gamma, config.train.rounds

    preset = f"{config.data.name}-{config.partition.beta:g}"
    return preset in preset_names() and told(config) == told(load_config(preset))


def is_the_papers_method(config: Config) -> bool:
    """Return whether a run's method is the paper's: with its own learner, its own loss and default options."""
    method = config.method
    kept = {name: value for name, value in method.options.items() if name in STILL_THE_PAPERS}
    plain = config.replace({"method.options": kept})
    own = method.learner is None and method.closing is None and method.criterion is None
    return own and create_method(config) == create_method(plain)


def published(dataset: str, beta: float, method: str, metric: str) -> float | None:
    """Return the paper's value in percent, or None if it has none."""
    return _table(PUBLISHED).get((dataset, beta, method, metric))


@cache
def _table(path: Path) -> dict[tuple[str, float, str, str], float]:
    """Read the columns dataset, beta, method, metric, value."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            (row["dataset"], float(row["beta"]), row["method"], row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
        }
