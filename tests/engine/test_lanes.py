"""What lanes do when a driver or a capture fails, with a driver that only takes notes; on a GPU: tests/gpu."""

import ctypes
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fednca.engine import lanes
from fednca.engine.lanes import Lane, take_stream


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


class FailingGraph:
    """A graph that cannot be ended after a failure, as torch's."""

    def capture_begin(self, **_):
        self.open = True

    def capture_end(self):
        self.open = False
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("full")])
def test_a_capture_that_fails_tells_the_first_failure(error, monkeypatch):
    graph = FailingGraph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(lanes, "own_dropout", nullcontext)
    lane = Lane(torch.device("cpu"))
    lane.stream = lane.rng = lane.pool = None

    def work():
        raise error

    with pytest.raises(type(error)) as raised:
        lane.capture(work)
    assert raised.value is error
    assert not graph.open
