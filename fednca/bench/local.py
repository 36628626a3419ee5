"""Train the runs of a bench in threads, several at once, until all are done or Ctrl-C."""

import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from fednca.base.devices import cpu_threads, pick_device
from fednca.base.errors import FedncaError
from fednca.base.files import explain_write, write_atomic
from fednca.base.randomness import GLOBAL
from fednca.bench.cells import Bench, Cell
from fednca.data.fetch import Progress
from fednca.data.load import federate
from fednca.engines.model import build_model
from fednca.methods import create_method
from fednca.runs import Run, resume, train
from fednca.runs.callbacks import Callback
from fednca.runs.folder import locked

if TYPE_CHECKING:
    from fednca.bench.view import BenchView
    from fednca.data.federation import Federation
    from fednca.runs.history import Best, Round

MOST_AT_ONCE = 4
HEADROOM = 0.9  # share of the free memory that more runs may take
# A thread that holds the GIL gives it to a waiting thread after this time; Python's default is 5 ms. A training step
# releases the GIL in each of its hundreds of operations. Beside a thread that is busy in Python it would wait that long
# after each of them.
SWITCH_SECONDS = 1e-4


@dataclass(frozen=True)
class Outcome:
    """How a bench ended."""

    failed: dict[str, str]  # reasons, by the run's name
    stopped: bool  # by Ctrl-C, before all runs were done


def train_bench(bench: Bench, view: "BenchView", at_once: int | None = None) -> Outcome:
    """Train the unfinished runs, `at_once` at a time; by default as many as a GPU has room for, and one on a CPU."""
    left = [cell for cell in bench.cells() if not cell.finished]
    if not left:
        return Outcome({}, stopped=False)
    device = pick_device(bench.config.device)
    with view:
        try_rows([cell for cell in left if not cell.begun], view.prepare)
        with explain_write(bench.folder):
            bench.folder.mkdir(parents=True, exist_ok=True)
        with locked(bench.folder), cpu_threads(bench.config.threads):
            bench.save()
            return LocalExecutor(left, device, at_once, view).work_off()


def try_rows(cells: Sequence[Cell], progress: Progress) -> None:
    """Load the data and build each row's model once, so that mistakes show before any training."""
    if not cells:
        return
    classes = federate(cells[0].config, progress).dataset.classes
    for cell in {cell.row.text: cell for cell in reversed(cells)}.values():
        try:
            build_model(cell.config, create_method(cell.config), classes, pretrained=cell.config.model.pretrained)
        except FedncaError as error:
            raise FedncaError(f"{cell.row.text}: {error}") from error


class LocalExecutor:
    """Train cells in threads; they send calls to the waiting thread, which alone updates the view."""

    def __init__(self, cells: Sequence[Cell], device: torch.device, at_once: int | None, view: "BenchView") -> None:
        """Take the cells in order; on a GPU without `at_once`, the first one shows how many fit."""
        self.waiting, self.device, self.view = deque(cells), device, view
        self.at_once = at_once or 1
        self.measuring = at_once is None and device.type == "cuda"
        self.running: dict[Cell, threading.Thread] = {}
        self.told: SimpleQueue[Callable[[], None]] = (
            SimpleQueue()
        )  # unlike Queue, a signal handler may put while this thread gets
        self.failed: dict[str, str] = {}
        self.given_up: list[Cell] = []
        self.stops = 0  # 1: start no more cells, end running ones after their round; 2: after their client

    def work_off(self) -> Outcome:
        """Train all cells, or as many as Ctrl-C leaves time for."""
        with interrupts_call(self.stop), quick_switches():
            try:
                while self.running or (self.waiting and not self.stops):
                    self.start_some()
                    self.told.get()()
            finally:
                self.stops += 2  # if this thread failed, the others must stop too
                for thread in self.running.values():
                    thread.join()
        return Outcome(self.failed, stopped=bool(self.waiting or self.given_up))

    def stop(self) -> None:
        """Let running cells end after their round, or, on the second call, as soon as they can."""
        self.stops += 1
        self.told.put(self.view.stopping)

    def start_some(self) -> None:
        """Start waiting cells while there is room."""
        while self.waiting and len(self.running) < self.at_once and not self.stops:
            cell = self.waiting.popleft()
            before = torch.cuda.mem_get_info(self.device)[0] if self.measuring else None
            self.running[cell] = threading.Thread(target=self.train, args=(cell, before), name=cell.name)
            self.running[cell].start()

    def train(self, cell: Cell, free_before: int | None) -> None:
        """Train one cell in its own thread, and report how it ended."""
        end: Callable[[], None] = partial(self.on_failed, cell, "its thread ended")
        try:
            with own_stream(self.device), ExitStack() as starting:
                # Cells start one after another: each may decode the dataset, and measures how much memory is left.
                starting.enter_context(GLOBAL)
                train_or_resume(cell, Watch(self, cell, starting.close, free_before))
            end = partial(self.on_finished, cell)
        except KeyboardInterrupt:
            end = partial(self.on_given_up, cell)
        except Exception as error:  # noqa: BLE001 - no error of one cell may stop the others
            end = partial(self.on_failed, cell, in_a_sentence(error, cell))
        finally:
            self.told.put(end)

    def on_finished(self, cell: Cell) -> None:
        """Record that a cell has finished."""
        del self.running[cell]
        self.view.finish(cell, Run(cell.folder).results["val"]["test"])

    def on_failed(self, cell: Cell, reason: str) -> None:
        """Record why a cell has failed."""
        del self.running[cell]
        self.failed[cell.name] = reason
        self.view.fail(cell, reason)

    def on_given_up(self, cell: Cell) -> None:
        """Record that a cell was stopped."""
        del self.running[cell]
        self.given_up.append(cell)

    def on_measured(self, free: int, taken: int) -> None:
        """Decide how many cells run at once, from the memory that one took."""
        if self.measuring:
            self.measuring = False
            self.at_once = how_many_fit(len(self.running) + len(self.waiting), free, taken)
            self.view.note(f"{self.at_once} runs at once: one takes {taken / 2**30:.1f} GiB of the GPU's memory")


class Watch(Callback):
    """Tells the executor of a cell, and stops it where the executor wants that."""

    def __init__(
        self, executor: LocalExecutor, cell: Cell, started: Callable[[], None], free_before: int | None
    ) -> None:
        """Call `started` before the first round; `free_before`: free memory before the cell, if it is measured."""
        self.executor, self.cell, self.started, self.free_before = executor, cell, started, free_before

    def on_prepare(self, what: str, done: int, total: int) -> None:
        """Report the progress of decoding; if stopped here, it starts again next time."""
        self.tell(self.executor.view.prepare, what, done, total)
        self.stop_from(1)

    def on_start(self, run: Run, federation: "Federation", rounds_done: int) -> None:
        """Let the next cell start."""
        self.started()
        self.tell(self.executor.view.begin, self.cell, rounds_done)

    def on_note(self, text: str) -> None:
        """Report a note about the run."""
        self.tell(self.executor.view.note, text)

    def on_client(self, number: int, client: int, losses: dict[str, float]) -> None:
        """Stop in the middle of a round if Ctrl-C was pressed twice."""
        self.stop_from(2)

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Report the round's metrics, and stop here if asked to; after the last round there is nothing to stop."""
        self.tell(self.executor.view.round, self.cell, record)
        if self.free_before is not None:
            free = torch.cuda.mem_get_info(self.executor.device)[0]
            self.tell(self.executor.on_measured, free, self.free_before - free)
            self.free_before = None
        if record.number < self.cell.config.train.rounds:
            self.stop_from(1)

    def tell(self, what: Callable[..., None], *facts: object) -> None:
        """Let the waiting thread make this call."""
        self.executor.told.put(partial(what, *facts))

    def stop_from(self, stops: int) -> None:
        """Stop the run if the executor was asked to stop at least `stops` times."""
        if self.executor.stops >= stops:
            raise KeyboardInterrupt


def train_or_resume(cell: Cell, watch: Callback) -> None:
    """Train a cell from its start, or resume it."""
    error_file(cell).unlink(missing_ok=True)
    if cell.begun:
        resume(cell.folder, [watch])
    else:
        (cell.folder / "config.toml.partial").unlink(missing_ok=True)  # left by a kill before the run existed
        train(cell.config, cell.folder, [watch])


def error_file(cell: Cell) -> Path:
    """Return the file for the traceback of a cell's unexpected error; it lies beside the run's folder, not in it."""
    return cell.folder.with_name(f"{cell.folder.name}-error.txt")


def in_a_sentence(error: Exception, cell: Cell) -> str:
    """Say in one sentence what went wrong with a cell; keep the traceback of an unexpected error."""
    if isinstance(error, FedncaError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory is full; use a smaller --at-once, batch_size or image_size"
    if isinstance(error, OSError | MemoryError):
        return str(error) or "not enough memory"
    error_file(cell).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(error_file(cell), "".join(traceback.format_exception(error)).encode())
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line} (see '{error_file(cell)}')"


def how_many_fit(cells: int, free: int, taken: int) -> int:
    """Return how many runs fit on a GPU at once, given the memory that one run took and left free.

    >>> how_many_fit(12, free=100, taken=40)
    3
    """
    return min(cells, MOST_AT_ONCE, 1 + int(HEADROOM * free / max(1, taken)))


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Give the thread its own CUDA stream, since work in a shared stream runs one after another."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let threads switch quickly, every `SWITCH_SECONDS`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def interrupts_call(action: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call an action instead of raising, if this is the thread that receives it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
