"""The progress of a bench: a live picture on a terminal, otherwise a line whenever a run starts or ends."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fednca.measures.metrics import SHOWN

if TYPE_CHECKING:
    from fednca.bench.cells import Cell
    from fednca.runs.history import Round

Record = Mapping[str, Any]
LAST_SHOWN = 5  # ended runs that stay on screen


def view_for(console: Console, cells: "Sequence[Cell]") -> "BenchView":
    """Return the view that fits the console."""
    return (LiveView if console.is_terminal else BenchView)(console, cells)


class BenchView:
    """A line when a run starts, ends or fails, for logs and pipes. Call it from one thread only."""

    def __init__(self, console: Console, cells: "Sequence[Cell]") -> None:
        """Take all runs of the bench, including finished ones."""
        self.console, self.all = console, len(cells)
        self.done = sum(cell.finished for cell in cells)
        self.rounds_left = sum(cell.config.train.rounds for cell in cells if not cell.finished)
        self.rounds_trained = 0
        self.rounds: dict[Cell, int] = {}  # rounds done so far by each running cell
        self.began: float | None = None
        self.last_round = 0.0
        self.notes: set[str] = set()

    def __enter__(self) -> Self:
        """Start watching."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the last picture on screen."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Print a line when a split starts decoding and when it is done."""
        if done in {0, total}:
            self.say(f"preparing {what}: {done} of {total}")

    def note(self, text: str) -> None:
        """Print a sentence, unless it was printed before."""
        if text not in self.notes:
            self.notes.add(text)
            self.say(text)

    def begin(self, cell: "Cell", rounds_done: int) -> None:
        """Tell that a run starts or resumes."""
        self.began = time.monotonic() if self.began is None else self.began
        self.rounds[cell] = rounds_done
        self.rounds_left -= rounds_done
        self.tell(f"{cell.name}: " + (f"resumes after round {rounds_done}" if rounds_done else "starts"))

    def round(self, cell: "Cell", record: "Round") -> None:
        """Count a finished round."""
        self.rounds[cell] = record.number
        self.rounds_left -= 1
        self.rounds_trained += 1
        self.last_round = time.monotonic()

    def finish(self, cell: "Cell", metrics: Record) -> None:
        """Tell that a run ended with these metrics on test images."""
        self.done += 1
        self.rounds.pop(cell, None)
        self.tell(f"{cell.name}: {reached(metrics)}", "green")

    def fail(self, cell: "Cell", reason: str) -> None:
        """Tell why a run failed."""
        self.rounds_left -= cell.config.train.rounds - self.rounds.pop(cell, 0)
        self.tell(f"{cell.name}: failed, {reason}", "red")

    def stopping(self) -> None:
        """Confirm Ctrl-C and say what happens next."""
        self.note("stopping as soon as the current rounds are done; press Ctrl-C again to abandon them")

    def tell(self, what: str, style: str = "") -> None:
        """Print what a run did, with the progress of the whole bench; a run that ended has a style."""
        self.say(" | ".join(filter(None, [what, self.count(), self.times()])))

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def times(self) -> str:
        """Return the time spent and, at the pace so far, the time left."""
        if self.began is None:
            return ""
        now = time.monotonic()
        if not (self.rounds_trained and self.rounds_left):
            return clock(now - self.began)
        pace = (self.last_round - self.began) / self.rounds_trained
        left = max(0.0, pace * self.rounds_left - (now - self.last_round))
        return f"{clock(now - self.began)}, {clock(left)} left"

    def count(self) -> str:
        """Return how many runs are done."""
        return f"{self.done} of {self.all} runs done"


class LiveView(BenchView):
    """A bar over all rounds, the running runs, and the last few that ended."""

    def __init__(self, console: Console, cells: "Sequence[Cell]") -> None:
        super().__init__(console, cells)
        self.scores: dict[Cell, str] = {}
        self.ended: deque[Text] = deque(maxlen=LAST_SHOWN)
        self.preparing = ""
        self.live = Live(get_renderable=self.picture, console=console, refresh_per_second=4)

    def __exit__(self, *error: object) -> None:
        """Draw a last time and stop."""
        self.live.stop()

    def prepare(self, what: str, done: int, total: int) -> None:
        """Show the progress of decoding."""
        self.live.start()
        self.preparing = "" if done == total else f"  preparing {what}: {done} of {total}"

    def begin(self, cell: "Cell", rounds_done: int) -> None:
        """List the run as running."""
        self.live.start()
        super().begin(cell, rounds_done)

    def round(self, cell: "Cell", record: "Round") -> None:
        """Show the run's score on validation images."""
        super().round(cell, record)
        select = cell.config.evaluate.select
        if record.metrics:
            self.scores[cell] = f"val {SHOWN.get(select, 'mean AP')} {percent(record.metrics['val'][select])}"

    def tell(self, what: str, style: str = "") -> None:
        """List a run among those that ended."""
        if style:
            self.ended.append(Text(f"  {what}", style=style))

    def picture(self) -> RenderableType:
        """Return the current picture."""
        whole = max(1, self.rounds_trained + self.rounds_left)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(whole, self.rounds_trained, width=30), self.count(), self.times())
        running = Table.grid(padding=(0, 2), pad_edge=True)
        for cell, number in list(self.rounds.items()):
            running.add_row(cell.name, f"round {number}/{cell.config.train.rounds}", self.scores.get(cell, ""))
        ended = [Text(text.plain, text.style, no_wrap=True, overflow="ellipsis") for text in list(self.ended)]
        now = ([Text(self.preparing)] if self.preparing else []) + ([running] if running.row_count else [])
        return Group(bar, *now, *ended)


def reached(metrics: Record) -> str:
    """Write the test metrics of a finished run in a row."""
    return " ".join(f"{SHOWN[key]} {percent(metrics[key])}" for key in ("macro_auc", "macro_f1"))


def percent(value: float | None) -> str:
    """Write a share in percent, and None as a dash.

    >>> percent(0.9284), percent(None)
    ('92.8', '–')
    """
    return "–" if value is None else f"{100 * value:.1f}"


def clock(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds.

    >>> clock(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
