"""Access to the records by setting, row, partition draw and training seed."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from plan import DRAW_ROUNDS, DRAWS, GRID, SAMPLES, SEEDS, SETTINGS, Entry, Records, chosen_draw, rounds_of, trained_in

from fednca.report.comparison import COLUMNS, value_of

METRICS = COLUMNS
COMPARED = ("macro_f1", "macro_f1_calibrated", "macro_auc")  # the metrics that order methods

Record = Mapping[str, Any]
Measure = Callable[[Record, str], float | None]  # a metric of a run, in percent


class Study:
    """All records, and the chosen draw of each setting."""

    def __init__(self, records: Records) -> None:
        """Take records, given by the path of their entry."""
        self.records = records
        self.chosen = {setting: chosen_draw(setting, records) for setting in (*SETTINGS, *SAMPLES)}

    def find(self, setting: str, row: str, draw: int, seed: int, rounds: int | None = None) -> Record | None:
        """Return the record of a run, or None; rounds: the setting's by default."""
        return self.records.get(Entry(setting, row, draw, seed, rounds or rounds_of(setting)).path)

    def over_seeds(self, setting: str, row: str) -> dict[int, Record]:
        """Return a row's records on the setting's chosen draw, by seed."""
        setting = trained_in(setting, row)
        draw = self.chosen[setting]
        found = {} if draw is None else {seed: self.find(setting, row, draw, seed) for seed in SEEDS}
        return {seed: record for seed, record in found.items() if record is not None}

    def everywhere(self, setting: str, row: str, rounds: int | None = None) -> dict[tuple[int, int], Record]:
        """Return a row's records by draw and seed."""
        found = {(draw, seed): self.find(setting, row, draw, seed, rounds) for draw in DRAWS for seed in SEEDS}
        return {place: record for place, record in found.items() if record is not None}

    def trials(self) -> dict[Path, Record]:
        """Return the records of runs that tried out changes to one of the paper's settings."""
        own = {path: record for path, record in sorted(self.records.items()) if record["setting"] not in GRID}
        return {path: record for path, record in own.items() if tried(path, record)}

    def notes(self, settings: Iterable[str], rows: Iterable[str]) -> list[str]:
        """Return the notes of rows, each naming its settings if the row has different notes in others."""
        shown = {(setting, row) for setting in settings for row in rows}
        said: dict[tuple[str, str], set[str]] = {}  # settings by row and note; the note may be empty
        for record in self.records.values():
            if (record["setting"], record["row"]) in shown:
                said.setdefault((record["row"], record["note"]), set()).add(record["setting"])
        differing = {row for row, _ in said if sum(own == row for own, _ in said) > 1}
        return [
            f"{row}{' on ' + ', '.join(sorted(where)) if row in differing else ''}: {note}."
            for (row, note), where in sorted(said.items())
            if note
        ]


def tried(path: Path, record: Record) -> str:
    """Return the changes in a record's name, besides draw and seed; empty for a planned run."""
    setting = record["setting"]
    planned = Entry(setting, record["row"], record["draw"], record["seed"], rounds_of(setting)).path.stem
    return path.stem.removeprefix(planned).removeprefix(f"-rounds-{DRAW_ROUNDS}").removeprefix("-")


def dataset_and_beta(setting: str) -> tuple[str, float]:
    """Split a setting's name into dataset and beta.

    >>> dataset_and_beta("cifar10-0.5")
    ('cifar10', 0.5)
    """
    dataset, _, beta = setting.rpartition("-")
    return dataset, float(beta)


def gamma_and_beta(setting: str) -> list[str]:
    """Return gamma and beta of a setting of the grid, as texts.

    >>> gamma_and_beta("digits-0.1-0.5")
    ['0.5', '0.1']
    """
    return [str(GRID[setting][f"partition.{name}"]) for name in ("gamma", "beta")]


def validation_of(record: Record, metric: str) -> float | None:
    """Return a validation metric in percent, at threshold 0.5, of the best round by validation."""
    value = record["results"]["val"]["val"][metric]
    return None if value is None else 100 * value


def metric_of(record: Record, metric: str, select: str = "val") -> float | None:
    """Return a test metric in percent; None for a calibrated one at the round that the paper's code would choose.

    Older records lack that one, and a mean over the newer ones alone would look like one over all.
    """
    result = record["results"][select]
    value = value_of(result if select != "paper" else {"test": result["test"]}, metric)
    return None if value is None else 100 * value
