"""What lanes do when a driver or a capture fails, with a driver that only takes notes; on a GPU: tests/gpu."""

import ctypes
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fednca.engines.graphs import lanes
from fednca.engines.graphs.lanes import Lane, take_stream


def test_a_driver_that_is_not_there_is_a_reason_to_do_without_graphs(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"the CUDA driver is not to be found: libcuda"):
        take_stream(torch.device("cuda"))


def test_a_stream_is_created_on_its_own_device(monkeypatch):
    chosen, created = [], []

    @contextmanager
    def choose(device):
        chosen.append(device)
        yield
        chosen.pop()

    class Driver:
        def cuStreamCreate(self, pointer, flags):  # noqa: N802 (the driver's name)
            created.append(list(chosen))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.cuda, "device", choose)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: device)
    second = torch.device("cuda", 1)
    assert take_stream(second) == second
    assert created == [[second]]


class Graph:
    """Notes in which pool it was captured, and how often it was replayed."""

    pools, replays = [], 0

    def capture_begin(self, pool, capture_error_mode):
        self.pools.append(pool)
        self.open = True

    def capture_end(self):
        self.open = False

    def replay(self):
        self.replays += 1


class FailingGraph(Graph):
    """A graph that cannot be ended after a failure, as torch's."""

    def capture_end(self):
        super().capture_end()
        raise RuntimeError("operation failed due to a previous error during capture")


class Stream:
    """A stream on which everything is done."""

    def synchronize(self):
        pass


@pytest.fixture
def lane(monkeypatch):
    """Return a lane that works as on a GPU, with graphs that take notes."""
    handles = iter(range(99))
    monkeypatch.setattr(Graph, "pools", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(lanes, "own_dropout", nullcontext)
    lane = Lane(torch.device("cpu"))
    lane.device, lane.stream, lane.rng = torch.device("cuda"), Stream(), None
    return lane


def fail(error):
    raise error


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("full")])
def test_a_capture_that_fails_tells_the_first_failure(error, lane, monkeypatch):
    graph = FailingGraph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    with pytest.raises(type(error)) as raised:
        lane.capture(lambda: fail(error))
    assert raised.value is error
    assert not graph.open


def test_graphs_share_a_pool_until_all_are_gone_or_a_capture_fails(lane):
    lane.do("a", list)
    lane.do("b", list)
    lane.graphs.clear()
    lane.do("c", list)
    with pytest.raises(ZeroDivisionError):
        lane.do("d", lambda: 1 / 0)
    lane.do("e", list)
    a, b, c, d, e = Graph.pools
    assert a == b
    assert c == d
    assert len({a, c, e}) == 3


@pytest.mark.parametrize("renews", [True, False])
def test_more_graphs_than_are_kept_are_renewed_or_done_without(renews, lane, monkeypatch):
    monkeypatch.setattr(lanes, "GRAPHS_KEPT", 2)
    lane.renews, done = renews, []
    for name in "abcc":
        lane.do(name, lambda name=name: done.append(name))
    assert list(lane.graphs) == (["b", "c"] if renews else ["a", "b"])
    assert done == (["a", "b", "c"] if renews else ["a", "b", "c", "c"])  # a capture notes, too
    assert [graph.replays for graph in lane.graphs.values()] == ([1, 2] if renews else [1, 1])
