"""Watching a bench: one live picture on a terminal, a line when a run begins or ends elsewhere."""

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
LAST_SHOWN = 5  # of the ended runs


def view_for(console: Console, cells: "Sequence[Cell]") -> "BenchView":
    """Return the view that fits the console."""
    return (LiveView if console.is_terminal else PlainView)(console, cells)


class BenchView:
    """Counts runs and rounds; what is shown of them is left to others. Only one thread may call it."""

    def __init__(self, console: Console, cells: "Sequence[Cell]") -> None:
        """Take all runs that are asked for, the finished ones too."""
        self.console, self.all = console, len(cells)
        self.done = sum(cell.finished for cell in cells)
        self.rounds_left = sum(cell.config.train.rounds for cell in cells if not cell.finished)
        self.rounds_trained = 0
        self.rounds: dict[Cell, int] = {}  # done by each running cell
        self.began: float | None = None
        self.last_round = 0.0
        self.notes: set[str] = set()

    def __enter__(self) -> Self:
        """Begin to watch."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the last picture standing."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Hear how many images have been decoded."""

    def note(self, text: str) -> None:
        """Print a sentence, once."""
        if text not in self.notes:
            self.notes.add(text)
            self.say(text)

    def begin(self, cell: "Cell", rounds_done: int) -> None:
        """Hear that a run begins, or goes on."""
        self.began = time.monotonic() if self.began is None else self.began
        self.rounds[cell] = rounds_done
        self.rounds_left -= rounds_done

    def round(self, cell: "Cell", record: "Round") -> None:
        """Hear of a round."""
        self.rounds[cell] = record.number
        self.rounds_left -= 1
        self.rounds_trained += 1
        self.last_round = time.monotonic()

    def finish(self, cell: "Cell", metrics: Record) -> None:
        """Hear of a run's end and its metrics on test images."""
        self.done += 1
        self.rounds.pop(cell, None)

    def fail(self, cell: "Cell", reason: str) -> None:
        """Hear that a run could not go on."""
        self.rounds_left -= cell.config.train.rounds - self.rounds.pop(cell, 0)

    def stopping(self) -> None:
        """Say that Ctrl-C was heard."""
        self.note("stopping as soon as the running rounds are done; Ctrl-C again gives up these rounds")

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def times(self) -> str:
        """Return how long it took so far, and how long it will take if rounds go on at this pace."""
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


class PlainView(BenchView):
    """A line when a run begins, ends or fails, for logs and pipes."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Print when the decoding of a split begins and when it is done."""
        if done in {0, total}:
            self.say(f"preparing {what}: {done} of {total}")

    def begin(self, cell: "Cell", rounds_done: int) -> None:
        """Print the run's name."""
        super().begin(cell, rounds_done)
        self.tell(f"{cell.name}: " + (f"goes on after round {rounds_done}" if rounds_done else "begins"))

    def finish(self, cell: "Cell", metrics: Record) -> None:
        """Print what the run reached."""
        super().finish(cell, metrics)
        self.tell(f"{cell.name}: {reached(metrics)}")

    def fail(self, cell: "Cell", reason: str) -> None:
        """Print why the run could not go on."""
        super().fail(cell, reason)
        self.tell(f"{cell.name}: failed, {reason}")

    def tell(self, what: str) -> None:
        """Print a line that ends with how far everything is."""
        self.say(" | ".join(filter(None, [what, self.count(), self.times()])))


class LiveView(BenchView):
    """A bar over all rounds, the running runs, and those that ended last."""

    def __init__(self, console: Console, cells: "Sequence[Cell]") -> None:
        """Draw on the console."""
        super().__init__(console, cells)
        self.scores: dict[Cell, str] = {}
        self.ended: deque[Text] = deque(maxlen=LAST_SHOWN)
        self.preparing = ""
        self.live = Live(get_renderable=self.picture, console=console, refresh_per_second=4)

    def __exit__(self, *error: object) -> None:
        """Draw a last time."""
        self.live.stop()

    def prepare(self, what: str, done: int, total: int) -> None:
        """Show how far the decoding is."""
        self.live.start()
        self.preparing = "" if done == total else f"  preparing {what}: {done} of {total}"

    def begin(self, cell: "Cell", rounds_done: int) -> None:
        """Show the run among the running ones."""
        self.live.start()
        super().begin(cell, rounds_done)

    def round(self, cell: "Cell", record: "Round") -> None:
        """Show what the round reached on validation images."""
        super().round(cell, record)
        select = cell.config.evaluate.select
        if record.metrics:
            self.scores[cell] = f"val {SHOWN.get(select, 'mean AP')} {percent(record.metrics['val'][select])}"

    def finish(self, cell: "Cell", metrics: Record) -> None:
        """Show the run among the last ones."""
        super().finish(cell, metrics)
        self.ended.append(Text(f"  {cell.name}: {reached(metrics)}", style="green"))

    def fail(self, cell: "Cell", reason: str) -> None:
        """Show why the run could not go on."""
        super().fail(cell, reason)
        self.ended.append(Text(f"  {cell.name}: failed, {reason}", style="red"))

    def picture(self) -> RenderableType:
        """Return what there is to see now."""
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
    """Write what a finished run reached on test images."""
    return " ".join(f"{SHOWN[key]} {percent(metrics[key])}" for key in ("macro_auc", "macro_f1"))


def percent(value: float | None) -> str:
    """Write a share in percent; a dash where there is none.

    >>> percent(0.9284), percent(None)
    ('92.8', '–')
    """
    return "–" if value is None else f"{100 * value:.1f}"


def clock(seconds: float) -> str:
    """Write a time as hours, minutes and seconds.

    >>> clock(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
