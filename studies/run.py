"""Train what the plan asks for and no record tells of yet, until the time is up.

python studies/run.py [--minutes 9] [--at-once 1] [--only dermamnist-0.1] [--later fedcurv] [--commit SHA]
                      [--records FOLDER]

The files lie in `data/`, as docs/results.md says.
"""

import argparse
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plan import CIFAR10, OF_DATASET, Entry, plan
from records import RECORDS, read_records, write_record
from rich.console import Console

from fednca.bench import Cell
from fednca.crew import Crew
from fednca.report.bench_view import PlainView, Record
from fednca.rows import parse_row
from fednca.runs import Run
from fednca.setup import pick_device

RUNS = Path("runs/study")
FIRST_GUESS = 0.8  # seconds per round of a run alone, where no record of its row tells


def main() -> None:
    """Work off the plan."""
    parser = argparse.ArgumentParser(description="Train the runs of docs/results.md that are missing.")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run begins that would end later")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--only", default="", help="entries whose path begins so")
    parser.add_argument("--later", nargs="*", default=[], metavar="ROW", help="rows left for another time")
    parser.add_argument("--commit", help="what the code is, where git cannot tell")
    parser.add_argument("--records", type=Path, default=RECORDS, help="where records are read and written")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    commit = given.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    while missing := left(given.records, given.only, given.later):
        work_off(missing, given.records, commit, deadline, given.at_once)
        if left(given.records, given.only, given.later)[:1] == missing[:1]:  # no time for it, or it failed
            break


def left(folder: Path, only: str, later: list[str]) -> list[Entry]:
    """Return the planned runs that have no record and are wanted now."""
    records = read_records(folder)
    wanted = [entry for entry in plan(records) if str(entry.path).startswith(only) and entry.row not in later]
    return [entry for entry in wanted if entry.path not in records and is_settled(entry)]


def is_settled(entry: Entry) -> bool:
    """Tell whether a run's settings are final: CIFAR-10's are not before its open choices stand in the plan."""
    return entry.setting not in CIFAR10 or bool(entry.changes) or bool(OF_DATASET["cifar10"])


def work_off(entries: list[Entry], records: Path, commit: str, deadline: float, at_once: int) -> None:
    """Train entries in their order as long as there is time, and write their records."""
    cells = {cell_of(entry): entry for entry in entries}
    view = Keeper(cells, records, commit, deadline, at_once)
    view.crew = Crew(list(cells), pick_device("auto"), at_once, view)
    view.stop_in_time()
    view.crew.work_off()


def cell_of(entry: Entry) -> Cell:
    """Return an entry as a run that a crew can train."""
    return Cell(parse_row(entry.row), entry.seed, entry.config(), RUNS / entry.path.with_suffix(""))


class Keeper(PlainView):
    """Writes the record of each run that ends, and sees that none begins too late."""

    crew: Crew

    def __init__(self, cells: dict[Cell, Entry], records: Path, commit: str, deadline: float, at_once: int) -> None:
        """Take the runs to come."""
        super().__init__(Console(width=160), list(cells))
        self.entries, self.records, self.commit, self.deadline = cells, records, commit, deadline
        self.guess = at_once * FIRST_GUESS
        self.paces: dict[tuple[str, str, int], float] = {}  # seconds per round, by setting, row and image size
        for record in read_records(records).values():
            self.learn(record)

    def learn(self, record: Mapping[str, Any]) -> None:
        """Note how long a run took; of several like it, the slowest counts."""
        key = (record["setting"], record["row"], record["config"]["data"]["image_size"])
        pace = record["seconds"] / record["config"]["train"]["rounds"]
        self.paces[key] = max(pace, self.paces.get(key, 0.0))

    def finish(self, cell: Cell, metrics: Record) -> None:
        """Keep the record and drop the run."""
        super().finish(cell, metrics)
        write_record(self.entries[cell], Run(cell.folder), self.commit, self.records)
        shutil.rmtree(cell.folder)
        self.learn(read_records(self.records)[self.entries[cell].path])
        self.stop_in_time()

    def fail(self, cell: Cell, reason: str) -> None:
        """Go on with what there is time for."""
        super().fail(cell, reason)
        self.stop_in_time()

    def stop_in_time(self) -> None:
        """Let go of the runs that would end too late."""
        left = self.deadline - time.monotonic()
        self.crew.waiting = deque(cell for cell in self.crew.waiting if self.seconds(self.entries[cell]) < left)

    def seconds(self, entry: Entry) -> float:
        """Return how long a run takes: as others like it, else as long as the slowest of all."""
        key = (entry.setting, entry.row, entry.config().data.image_size)
        pace = self.paces.get(key) or max([self.guess, *self.paces.values()])
        return pace * entry.rounds


if __name__ == "__main__":
    main()
