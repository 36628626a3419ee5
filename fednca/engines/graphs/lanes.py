"""Streams of a GPU, and the work that is captured and replayed on them; `graphs` says what that means."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from fednca.base.randomness import GLOBAL

GRAPHS_KEPT = 64  # per lane, one for each size of batch; each holds memory
NON_BLOCKING = 1  # the driver's flag for a stream that does not wait for the default one
_idle: dict[torch.device, list[torch.cuda.Stream]] = {}  # given back by lanes that were closed


class Lane:
    """A stream of the device with its own memory and its own dropout, and the graphs that were captured on it.

    The graphs of a lane share one pool of memory for what they compute on the way, which is safe because they never run
    at the same time. Graphs of two lanes do, so no two lanes share a pool.
    """

    def __init__(self, device: torch.device, *, renews: bool = True) -> None:
        """Open the stream; on a CPU there is none, and work is done at once.

        Where there are more graphs than are kept, the oldest one goes; a lane that does not renew its graphs does what
        is new without one.
        """
        self.device, self.renews = device, renews
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self.stream = take_stream(device)
            self.rng = torch.Generator(device)

    def do(self, key: object, work: Callable[[], None]) -> None:
        """Do work that always touches the same memory: capture it the first time, and replay it from then on.

        key: what tells this work from other work of the lane, such as the size of the batch.
        """
        if self.device.type != "cuda":
            work()
            return
        if key not in self.graphs:
            if len(self.graphs) >= GRAPHS_KEPT and not self.renews:
                work()
                return
            self.graphs[key] = self.capture(work)
            while len(self.graphs) > GRAPHS_KEPT:
                self.synchronize()  # the graph's replays may not be done, and its memory is about to be reused
                del self.graphs[next(iter(self.graphs))]
        self.graphs[key].replay()  # on the current stream; after a capture too, since that ran nothing

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record work without doing it."""
        if not self.graphs:
            self.pool = torch.cuda.graph_pool_handle()  # one whose graphs are all gone takes no others
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), own_dropout(self.rng), no_collection():
            # Thread-local: another thread may wait for the GPU or allocate meanwhile without spoiling the capture.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # which says no more than that something had failed
                    graph.capture_end()
                self.pool = torch.cuda.graph_pool_handle()  # torch may not have let go of the other
                raise
            graph.capture_end()
        return graph

    def synchronize(self) -> None:
        """Wait for what was captured or replayed here: graphs are replayed on the current stream."""
        if self.device.type == "cuda":
            self.stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Drop the graphs and give the stream to whoever comes next."""
        self.synchronize()  # a run that failed may have left work
        self.graphs.clear()
        if self.device.type == "cuda":
            _idle.setdefault(self.device, []).append(self.stream)


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that nobody else has.

    Torch gives its 32 streams out again and again, and two lanes on the same one would wait for each other. So these
    come from the driver, and lanes that are closed give them back.
    """
    with GLOBAL:
        idle = _idle.setdefault(device, [])
        if idle:
            return idle.pop()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"the CUDA driver is not to be found: {error}") from None
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        failed = driver.cuStreamCreate(ctypes.byref(pointer), NON_BLOCKING)
    if failed:
        raise RuntimeError(f"no CUDA stream could be created (driver error {failed})")
    return torch.cuda.ExternalStream(pointer.value, device)  # type: ignore[no-untyped-call]


@contextmanager
def own_dropout(rng: torch.Generator) -> Iterator[None]:
    """Let dropout in a block, and in the graphs captured in it, draw from this generator.

    Dropout draws from torch's default generator, and a graph keeps to the state that it had when it was captured. If
    all lanes shared that state, what one client draws would depend on the others. So the default generator borrows the
    lane's state during the capture; whoever replays the graph seeds the lane's generator first.
    """
    usual = torch.cuda.default_generators[rng.device.index or 0]
    with GLOBAL:
        before = usual.graphsafe_get_state()
        usual.graphsafe_set_state(rng.graphsafe_get_state())
        try:
            yield
        finally:
            usual.graphsafe_set_state(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from freeing an old graph while another is captured, which would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
