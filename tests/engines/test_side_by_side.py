"""How clients of the graph engine take turns on streams, with streams that only take notes; on a GPU: tests/gpu."""

from contextlib import contextmanager

import pytest
import torch
from helpers import tiny
from parity import assert_agree, play, start

from fednca.engines.eager import EagerEngine
from fednca.engines.graphs.engine import GraphEngine
from fednca.methods.contract import Rule

UNEQUAL = {"partition__beta": 0.3, "partition__clients": 4, "train__precision": "float64"}


class Stream:
    """Notes whom it waited for; what was given to it is done when it was asked for it so many times."""

    def __init__(self, patience):
        self.patience, self.waited = patience, []

    def wait_stream(self, other):
        self.waited.append(other)

    def record_event(self):
        return Event(self.patience)


class Event:
    """Something that takes a while."""

    def __init__(self, patience):
        self.patience = patience

    def query(self):
        self.patience -= 1
        return self.patience < 0

    def synchronize(self):
        self.patience = 0


class Streams:
    """Which stream is the current one, in place of torch's."""

    def __init__(self, monkeypatch):
        self.main = self.current = Stream(0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.cuda, "stream", self.within)

    @contextmanager
    def within(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class SideBySide(GraphEngine):
    """The engine as on a GPU, whose steps are done where they would be launched."""

    def __init__(self, place, slots=2, patience=0):
        super().__init__(place, slots)
        for _, lane in self.slots:
            lane.stream, lane.rng = Stream(patience), torch.Generator()

    def train(self, number, clients, server, states):
        self.common.begin(server)
        return self._train_side_by_side(number, clients, states)


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


@pytest.mark.parametrize("patience", [0, 2, 1000], ids=["done at once", "done later", "done at the end"])
@pytest.mark.parametrize("name", ["fedavg", "fednca-ml", "scaffold", "fedcurv", "centralized"])
def test_clients_that_take_turns_agree_with_the_eager_engine(name, patience, streams):
    place, server = start(tiny(**UNEQUAL, method__name=name))
    expected = play(EagerEngine(place), server, 2)
    found = play(SideBySide(place, patience=patience), server, 2)
    assert_agree(found, expected, atol=1e-8, state_atol=1e-8 if name != "scaffold" else 1e-5)


def test_steps_go_to_their_lane_and_all_else_to_the_main_stream(streams, monkeypatch):
    place, server = start(tiny(**UNEQUAL))
    engine, seen = SideBySide(place), []
    for slot, lane in engine.slots:
        monkeypatch.setattr(
            slot,
            "step",
            lambda size, step=slot.step, lane=lane: seen.append(streams.current is lane.stream) or step(size),
        )
    monkeypatch.setattr(Rule, "finish", lambda rule, local, sums: seen.append(streams.current is streams.main) or {})
    for result in engine.train(1, range(4), server, {}):
        seen.append(streams.current is streams.main)
        assert result.update.steps
    assert len(seen) > 8
    assert all(seen)
    waited = [other for _, lane in engine.slots for other in lane.stream.waited]
    assert waited == [streams.main] * 4  # each client for what was drawn for it


def test_results_come_while_others_still_train(streams, monkeypatch):
    place, server = start(tiny(**UNEQUAL))
    engine, steps = SideBySide(place, slots=4), []
    for slot, _ in engine.slots:
        monkeypatch.setattr(slot, "step", lambda size, step=slot.step: steps.append(size) or step(size))
    trained = [len(steps) for _ in engine.train(1, range(4), server, {})]
    assert trained[0] < trained[-1] == len(steps)


def test_whoever_stops_listening_keeps_the_stream_it_has(streams):
    place, server = start(tiny(**UNEQUAL))
    results = SideBySide(place).train(1, range(4), server, {})
    next(results)
    streams.current = other = Stream(0)  # of another run, in whose thread the abandoned one is thrown away
    results.close()
    assert streams.current is other


def test_a_step_that_fails_leaves_the_main_stream_behind(streams, monkeypatch):
    place, server = start(tiny(**UNEQUAL))
    engine = SideBySide(place)
    monkeypatch.setattr(engine.slots[1][0], "step", lambda size: [][size])
    with pytest.raises(IndexError):
        list(engine.train(1, range(4), server, {}))
    assert streams.current is streams.main
