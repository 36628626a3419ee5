"""Progress of a run: a live view on a terminal, one plain line per round elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fednca.measures.metrics import SHOWN
from fednca.runs.callbacks import Callback

if TYPE_CHECKING:
    from fednca.data.federation import Federation
    from fednca.runs import Run
    from fednca.runs.history import Best, Round


@contextmanager
def watching(console: Console) -> Iterator[Callback]:
    """Yield the view that fits the console, and stop its drawing after the block, which gives the cursor back."""
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    view = LiveProgress(console)
    try:
        yield view
    finally:
        view.decoding.live.stop()
        view.live.stop()


def terms(losses: dict[str, float]) -> str:
    """Write loss terms on one line.

    >>> terms({"bce": 0.25, "neg": 0.0125})
    'bce 0.250 neg 0.013'
    """
    return " ".join(f"{name} {value:.3f}" for name, value in losses.items())


def scores(metrics: dict[str, Any]) -> str:
    """Write the paper's four metrics on one line; one that is not defined is a dash."""
    values = ((label, metrics[key]) for key, label in SHOWN.items())
    return " ".join(f"{label} {'–' if value is None else f'{value:.3f}'}" for label, value in values)


class PlainProgress(Callback):
    """One line per round, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_prepare(self, what: str, done: int, total: int) -> None:
        """Print when the decoding of a split begins and when it ends."""
        if done in {0, total}:
            self.console.print(f"preparing {what}: {done} of {total}", highlight=False, markup=False)

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Remember the number of rounds and the time."""
        self.rounds, self.done, self.began = run.config.train.rounds, rounds_done, time.monotonic()
        self.name = run.title

    def on_note(self, text: str) -> None:
        """Print a note on the run."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Print the round, its losses and metrics, and the time left."""
        number = record.number
        left = (time.monotonic() - self.began) / (number - self.done) * (self.rounds - number)
        parts = [f"{self.name} round {number}/{self.rounds}", terms(record.losses)]
        if record.metrics:
            parts += [f"val {scores(record.metrics['val'])}", f"test {scores(record.metrics['test'])}"]
        parts.append(f"{record.samples_per_second:.0f} images/s, {left:.0f} s left")
        self.console.print(" | ".join(parts), highlight=False, markup=False, soft_wrap=True)


class LiveProgress(Callback):
    """A bar over all local updates, with the current losses and the latest metrics below it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.preparing: dict[str, TaskID] = {}
        self.decoding = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self.now, self.reached = Text(), Text()
        self.live = Live(Group(self.bar, self.now, self.reached), console=console, refresh_per_second=8)

    def on_prepare(self, what: str, done: int, total: int) -> None:
        """Show the progress of the decoding."""
        if what not in self.preparing:
            self.preparing[what] = self.decoding.add_task(f"preparing {what}", total=total)
            self.decoding.start()
        self.decoding.update(self.preparing[what], completed=done)
        if done == total:
            self.decoding.stop()

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Start drawing."""
        config = run.config
        self.clients = (
            1 if run.method.rule.centralized else max(1, round(config.train.participation * config.partition.clients))
        )
        self.rounds = config.train.rounds
        self.task: TaskID = self.bar.add_task(escape(run.title), total=self.rounds, completed=rounds_done)
        self.live.start()

    def on_note(self, text: str) -> None:
        """Print a note on the run above the bar."""
        self.console.print(text, highlight=False, markup=False)

    def on_client(self, number: int, client: int, losses: dict[str, float]) -> None:
        """Show the client that has just finished."""
        self.bar.advance(self.task, 1 / self.clients)
        self.now.plain = f"  round {number}/{self.rounds}, client {client}: {terms(losses)}"

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Show what the round reached."""
        self.bar.update(self.task, completed=record.number)
        if record.metrics and best is not None:
            self.reached.plain = (
                f"  val  {scores(record.metrics['val'])}\n  test {scores(record.metrics['test'])}\n"
                f"  best round so far, by validation: {best.round}"
            )

    def on_end(self, run: "Run") -> None:
        """Stop drawing; the last view stays."""
        self.live.stop()
