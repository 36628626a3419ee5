"""Captured steps of clients side by side against the eager engine on the same GPU."""

import threading
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from helpers import TINY, tiny
from parity import assert_agree, distance_of_updates, play, start

import fednca.engines.graphs.engine
from fednca.engines.eager import EagerEngine
from fednca.engines.graphs.engine import CLOSE, FINISH, GraphEngine, sizes_of
from fednca.engines.select import select_engine
from fednca.kernels.layers import FusedBatchNorm2d, FusedMaxPool2d, FusedStem, stem_usable
from fednca.kernels.residual import FusedBasicBlock
from fednca.methods import method_names
from fednca.methods.contract import Learner, Rule
from fednca.runs import resume, train
from fednca.runs.callbacks import Callback

pytestmark = pytest.mark.gpu
UNEQUAL = {"partition__beta": 0.3, "partition__clients": 4, "device": "cuda"}


def graphs(place, slots=4, **options):
    return GraphEngine(place, slots, **options)


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("name", method_names())
def test_every_method_agrees_with_the_eager_engine(name, slots):
    config = tiny(
        **UNEQUAL,
        method__name=name,
        train__precision="float64",
        train__local_epochs=2,
        train__participation=0.75,
        train__augment={"hflip": True, "rotate": 9.0},
    )
    place, server = start(config, "cuda")
    expected = play(EagerEngine(place), server, 2)
    loose = 1e-8 if name != "scaffold" else 1e-5  # its states are differences of weights over steps·lr
    assert_agree(play(graphs(place, slots), server, 2), expected, atol=1e-8, state_atol=loose)


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize(("name", "what"), [("fedcurv", FINISH), ("spherefed", (CLOSE,))])
def test_sums_over_images_are_captured_and_what_they_are_without_graphs(name, what, precision, monkeypatch):
    monkeypatch.setattr("fednca.engines.local_update.LARGE_FINISH_BATCH", 16)
    monkeypatch.setattr("fednca.engines.local_update.FINISH_BATCH", 16)
    config = tiny(**UNEQUAL, method__name=name, train__precision=precision, evaluate__batch_size=16)
    place, server = start(config, "cuda")
    engine = graphs(place)
    found = play(engine, server, 3)
    without = graphs(place)  # which takes the model for itself
    without.passes.uncaptured.add(what)
    assert_agree(found, play(without, server, 3), atol=1e-6)
    assert not engine.passes.uncaptured
    assert (what, 16) in {key[:2] for key in engine.passes.lane.graphs}


class Waiting(Rule):
    """Sums over images by which the host waits for the device."""

    adds_up: ClassVar[bool] = True

    def sums(self, local, images, labels):
        return {"images": torch.full((), images.sum().item(), dtype=torch.float64, device=images.device)}

    def finish(self, local, sums):
        return sums


def test_sums_that_cannot_be_captured_are_added_up_without_graphs():
    place, server = start(tiny(**UNEQUAL, method__name="fedavg", train__precision="float64"), "cuda")
    place = replace(place, method=replace(place.method, rule=Waiting()))
    expected, engine = play(EagerEngine(place), server, 2), graphs(place)
    assert_agree(play(engine, server, 2), expected, atol=1e-8)  # which scores by graphs thereafter
    assert engine.passes.uncaptured == {FINISH}


def test_more_images_than_were_foreseen_are_scored():
    place, server = start(tiny(**UNEQUAL, train__precision="float64"), "cuda")
    engine = graphs(replace(place, test=place.val), 1)
    shards = (place.val, place.test, place.val)
    found = [engine.predict(server.weights, shard, 16) for shard in shards]
    expected = [EagerEngine(place).predict(server.weights, shard, 16) for shard in shards]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", method_names())
def test_a_round_in_float32_is_the_same_up_to_rounding(name):
    place, server = start(tiny(**UNEQUAL, method__name=name), "cuda")
    before = play(EagerEngine(place), server, 3)
    expected = play(EagerEngine(place), before.server, 1, before.states, first=4)
    found = play(graphs(place), before.server, 1, before.states, first=4)
    assert distance_of_updates(found.server, expected.server, before.server) < 1e-3


def test_bf16_with_kernels_of_our_own_is_as_near_to_float32_as_the_eager_engines():
    changes = {"model__backbone": "resnet18", "data__image_size": 64, "train__optimizer": "sgd", "train__lr": 1e-2}
    places = [start(tiny(**UNEQUAL, **changes, train__precision=each), "cuda") for each in ("float32", "bf16")]
    (exact, server), (rough, _) = places
    expected, eager = (play(EagerEngine(place), server, 1) for place in (exact, rough))
    engine = graphs(rough)
    images = rough.test.store.gather(rough.test.rows[:4])
    for model in (engine.passes.frozen.model, *(slot.model for slot, _ in engine.slots)):
        net = model.backbone.net
        assert type(net.conv1) is FusedStem
        assert stem_usable(images, net.conv1.weight)
        assert type(net.bn1) is FusedBatchNorm2d
        assert type(net.maxpool) is FusedMaxPool2d
        assert type(net.layer1[0]) is FusedBasicBlock
    found = play(engine, server, 1)
    apart = [distance_of_updates(each.server, expected.server, server) for each in (found, eager)]
    assert 0 < apart[0] < 1.5 * apart[1] < 0.2
    scored = [float((each.scores - expected.scores).abs().max()) for each in (found, eager)]
    assert scored[0] < 2 * scored[1] + 1e-3


@pytest.mark.parametrize("name", method_names())
def test_a_run_repeats_itself_and_goes_on_after_an_interruption(name, tmp_path):
    config = tiny(**UNEQUAL, method__name=name, train__precision="bf16", train__rounds=3, engine="auto")
    notes = []

    class Notes(Callback):
        def on_note(self, text):
            notes.append(text)

    once = train(config, tmp_path / "a", [Notes()])
    assert "CUDA graphs" in notes[0]
    again = train(config, tmp_path / "b")
    (tmp_path / "b/results.json").unlink()
    resume(tmp_path / "b")
    for which in ("last", "final"):
        first, second = (dict(run.state(which).server.weights) for run in (once, again))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    losses = [sum(record["losses"].values()) for record in once.history]
    assert losses[-1] < losses[0]


def test_runs_at_once_are_the_runs_alone(tmp_path):
    names = ["fedavg", "fednca-ml", "fedlgt", "fedcurv"]  # the last compiles kernels while others capture
    config = tiny(**UNEQUAL, train__precision="bf16", train__rounds=6, engine="graphs")
    alone = {name: train(config.replace({"method.name": name}), tmp_path / f"alone/{name}") for name in names}

    def run(name):
        with torch.cuda.stream(torch.cuda.Stream()):
            train(config.replace({"method.name": name}), tmp_path / f"together/{name}")

    threads = [threading.Thread(target=run, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        there = type(alone[name])(tmp_path / f"together/{name}")
        first, second = (dict(each.state("last").server.weights) for each in (alone[name], there))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_clients_that_do_not_fit_wait_for_their_turn(monkeypatch):
    place, server = start(tiny(**UNEQUAL), "cuda")
    roomy = graphs(place)
    free = iter([10**9, 5 * 10**8])  # a slot takes half of what there was, and as much again is left
    monkeypatch.setattr(fednca.engines.graphs.engine, "free_memory", lambda device: next(free))
    narrow = graphs(place)
    assert len(narrow.slots) == 1
    assert "1 clients at once (of 4 in a round: the GPU's memory has no room for more)" in narrow.note
    found, expected = (play(engine, server, 2) for engine in (narrow, roomy))
    assert_agree(found, expected, atol=0.0)


def test_judging_has_its_memory_before_clients_take_theirs(monkeypatch):
    captured = []

    def plan(self, wanted, largest, old=GraphEngine._plan):
        captured.extend(key[:2] for key in self.passes.lane.graphs)
        return old(self, wanted, largest)

    monkeypatch.setattr(GraphEngine, "_plan", plan)
    place, _ = start(tiny(**UNEQUAL, evaluate__batch_size=16, engine="graphs"), "cuda")
    assert isinstance(select_engine(place), GraphEngine)
    sizes = {*sizes_of(place.val, 16), *sizes_of(place.test, 16)}
    assert set(captured) == {("score", size) for size in sizes}


def test_memory_grows_with_the_clients_of_a_round_and_not_with_all():
    peaks = []
    for clients, share in ((5, 1.0), (50, 0.1)):
        config = tiny(
            device="cuda",
            partition__clients=clients,
            partition__min_samples=2,
            partition__beta=100.0,
            partition__gamma=1.0,
            data__options=TINY["data.options"] | {"train_singles": 60},
            train__participation=share,
            method__name="scaffold",
            model__backbone="resnet18",
            data__image_size=32,
        )
        place, server = start(config, "cuda")
        engine = graphs(place, 5, states_on_device=share == 1)
        torch.cuda.reset_peak_memory_stats()
        play(engine, server, 4)
        peaks.append(torch.cuda.max_memory_allocated())
        del place, server, engine
    assert peaks[1] < 1.2 * peaks[0]


def test_a_step_that_cannot_be_captured_falls_back_to_the_eager_engine(monkeypatch):
    def losses(self, *given, usual=Learner.losses):
        loss = usual(self, *given)["bce"]
        return {"bce": loss if loss.item() > 0 else -loss}  # waits for the device

    monkeypatch.setattr(Learner, "losses", losses)
    place, server = start(tiny(**UNEQUAL, method__name="fedprox", engine="auto"), "cuda")
    engine = select_engine(place)
    assert isinstance(engine, EagerEngine)
    assert engine.note.startswith("engine: eager, since a step cannot be captured")
    assert play(engine, server, 1).results
