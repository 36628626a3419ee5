"""Train the planned runs that have no record yet, until the time is up; a later call goes on from there.

python studies/run.py [--minutes 9] [--begin-for 7] [--at-once 1] [--only dermamnist-0.1] [--later fedcurv]
                      [--commit SHA] [--records FOLDER]

The files must lie in `data/`, as docs/results.md says. The exit code is 1 where a run failed.
"""

import argparse
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from plan import Entry, plan, voc
from records import AGAIN, RECORDS, read_records, write_record
from rich.console import Console

from fednca.base.devices import pick_device
from fednca.base.errors import FedncaError
from fednca.bench.cells import Cell
from fednca.bench.local import LocalExecutor, Outcome
from fednca.bench.rows import parse_row
from fednca.bench.view import BenchView, Record
from fednca.cli.flags import whole
from fednca.runs import Run

RUNS = Path("runs/study")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the missing runs of the plan."""
    parser = argparse.ArgumentParser(description="Train the runs of docs/results.md that are missing.")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="minutes after which all runs stop at the end of their round"
    )
    parser.add_argument(
        "--begin-for", type=float, help="minutes after which no new run starts, so that running ones can finish"
    )
    parser.add_argument("--at-once", type=whole(1), default=1, help="runs to train at the same time")
    parser.add_argument("--only", default="", help="train only entries whose path starts with this")
    parser.add_argument("--later", nargs="*", default=[], metavar="ROW", help="rows to leave for another time")
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder to read records from and write them to")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    last = deadline if given.begin_for is None else time.monotonic() + 60 * given.begin_for
    try:
        commit = given.commit or commit_of_this()
        missing = left(given.records, given.only, given.later)
        if not missing:
            sys.stdout.write("nothing to train: all planned runs among those asked for have their records\n")
        while missing:
            outcome = work_off(missing, given.records, commit, deadline, given.at_once, last)
            if outcome.failed:
                sys.exit(1)
            over = outcome.stopped or time.monotonic() >= last
            missing = [] if over else left(given.records, given.only, given.later)
    except FedncaError as error:
        parser.error(str(error))


def commit_of_this() -> str:
    """Return the commit of this code, from any working folder."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise FedncaError("git cannot tell which commit this code is; give it by --commit") from None
    return found.stdout.strip()


def left(folder: Path, only: str, later: list[str]) -> list[Entry]:
    """Return the planned runs that are wanted now and have no record, or one to be replaced."""
    records = read_records(folder)
    planned = (*plan(records), *voc(records))
    wanted = [entry for entry in planned if str(entry.path).startswith(only) and entry.row not in later]
    return [entry for entry in wanted if entry.path not in records or AGAIN in records[entry.path]["note"]]


def work_off(
    entries: list[Entry], records: Path, commit: str, deadline: float, at_once: int, last: float = math.inf
) -> Outcome:
    """Train entries in order and write their records until the deadline; start none after `last`."""
    cells = {Cell(parse_row(e.row), e.seed, e.config(), RUNS / e.path.with_suffix("")): e for e in entries}
    keeper = Keeper(cells, records, commit)
    executor = LocalExecutor(list(cells), pick_device("auto"), at_once, keeper)
    alarms = [threading.Timer(deadline - time.monotonic(), executor.stop)]
    if last < deadline:
        begin_no_more = partial(executor.told.put, executor.waiting.clear)  # done by the thread that begins runs
        alarms.append(threading.Timer(last - time.monotonic(), begin_no_more))
    for alarm in alarms:
        alarm.daemon = True
        alarm.start()
    outcome = executor.work_off()
    for alarm in alarms:
        alarm.cancel()
    keeper.wait()
    return outcome


class Keeper(BenchView):
    """Write the record of each finished run while others train, since a map of features takes a minute."""

    def __init__(self, cells: dict[Cell, Entry], records: Path, commit: str) -> None:
        """Take the runs that will be trained."""
        super().__init__(Console(width=160), list(cells))
        self.entries, self.records, self.commit = cells, records, commit
        self.threads, self.kept = ThreadPoolExecutor(2), list[Future[None]]()

    def finish(self, cell: Cell, metrics: Record) -> None:
        """Start writing the record; if an earlier one could not be written, raise its error."""
        super().finish(cell, metrics)
        for each in self.kept:
            if each.done():
                each.result()
        self.kept.append(self.threads.submit(self.keep, cell))

    def keep(self, cell: Cell) -> None:
        """Write the record and delete the run."""
        write_record(self.entries[cell], Run(cell.folder), self.commit, self.records)
        shutil.rmtree(cell.folder)

    def wait(self) -> None:
        """Return when all records are written."""
        self.threads.shutdown()
        for each in self.kept:
            each.result()


if __name__ == "__main__":
    main()
