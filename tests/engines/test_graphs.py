"""The steps of the graph engine, done without graphs on a CPU, against the eager engine; on a GPU: tests/gpu."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from helpers import tiny
from parity import assert_agree, distance_of_updates, play, start
from torch import nn

from fednca.base.errors import FedncaError, UnfitEngineError
from fednca.base.tensors import Layout, Packed, join
from fednca.engines.eager import EagerEngine
from fednca.engines.graphs.engine import CLOSE, FINISH, GraphEngine, spread
from fednca.engines.graphs.lanes import Lane
from fednca.engines.images import Shard
from fednca.engines.select import select_engine
from fednca.methods import method_names
from fednca.methods.contract import Rule, Server, average

UNEQUAL = {"partition__beta": 0.3, "partition__clients": 4}  # sizes that end in partial batches


def graphs(place, slots=2, **options):
    return GraphEngine(place, slots, **options)


def both(rounds=2, **changes):
    place, server = start(tiny(**UNEQUAL, **changes))
    eager = play(EagerEngine(place), server, rounds)
    return play(graphs(place), server, rounds), eager


def test_the_federation_of_these_tests_has_unequal_clients_and_partial_batches():
    place, _ = start(tiny(**UNEQUAL))
    sizes = [len(shard) for shard in place.train]
    assert len(set(sizes)) > 1
    assert any(size % place.config.train.batch_size for size in sizes)


@pytest.mark.parametrize("name", method_names())
def test_every_method_agrees_with_the_eager_engine(name):
    found, expected = both(
        method__name=name,
        train__precision="float64",
        train__local_epochs=2,
        train__participation=0.75,
        train__augment={"hflip": True, "rotate": 9.0},
    )
    # SCAFFOLD's states are differences of weights over steps·lr
    assert_agree(found, expected, atol=1e-8, state_atol=1e-8 if name != "scaffold" else 1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__optimizer": "sgd", "train__momentum": 0.9, "train__lr": 0.05},
        {"train__optimizer": "sgd", "train__lr": 0.05},
        {"train__clip_norm": 0.1},
        {"train__betas": [0.8, 0.95], "train__weight_decay": 0.3},
        {"method__name": "fedcurv", "method__learner": "fedlgt"},
        {"method__name": "fednca-ml", "method__options": {"variant": "released", "train_etf": True}},
        {"method__name": "fednca-ml", "method__options": {"queries": "learnable"}},
        {"model__norm": "group"},
        {"model__norm": "frozen"},
        {"train__batch_size": 7},
        {"train__weighting": "samples"},
    ],
    ids=str,
)
def test_every_way_to_train_agrees_with_the_eager_engine(changes):
    assert_agree(*both(train__precision="float64", **changes), atol=1e-8)


def cut(place, *sizes):
    """Deal all images anew, so many to each client."""
    store = place.train[0].store
    rows, labels = (torch.cat([getattr(shard, name) for shard in place.train]) for name in ("rows", "labels"))
    pieces = (torch.split(each[: sum(sizes)], sizes) for each in (rows, labels))
    place.train[:] = [Shard(store, *own) for own in zip(*pieces, strict=True)]


@pytest.mark.parametrize("name", method_names())
def test_clients_of_very_different_sizes_agree_with_the_eager_engine(name):
    place, server = start(
        tiny(method__name=name, partition__clients=4, train__precision="float64", train__batch_size=8)
    )
    cut(place, 1, 2, 9, 16)
    expected = play(EagerEngine(place), server, 2)
    found = play(graphs(place), server, 2)
    assert {result.update.samples for result in found.results} == {1, 2, 9, 16}
    assert_agree(found, expected, atol=1e-8, state_atol=1e-8 if name != "scaffold" else 1e-5)


def test_memory_is_planned_with_the_largest_batch_of_any_client(monkeypatch):
    place, _ = start(tiny(partition__clients=2, train__batch_size=8))
    cut(place, 9, 16)  # whose batches have 9 images, and 8
    planned = []
    monkeypatch.setattr(GraphEngine, "_plan", lambda self, wanted, largest: planned.append(largest) or wanted)
    graphs(place)
    assert planned == [9]


@pytest.mark.parametrize("name", ["fedavg", "fednca-ml", "fedprox", "scaffold", "fedlgt"])
@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-3), ("bf16", 5e-2)])
def test_a_round_in_coarser_arithmetic_is_the_same_up_to_rounding(name, precision, near):
    place, server = start(tiny(**UNEQUAL, method__name=name, train__precision=precision))
    # from fresh weights, AdamW would turn gradients that are nothing but rounding into whole steps
    before = play(EagerEngine(place), server, 3)
    expected = play(EagerEngine(place), before.server, 1, before.states, first=4)
    found = play(graphs(place), before.server, 1, before.states, first=4)
    assert distance_of_updates(found.server, expected.server, before.server) < near


def test_bf16_is_not_float32():
    place, server = start(tiny(**UNEQUAL, train__precision="bf16"))
    single, _ = start(tiny(**UNEQUAL))
    apart = distance_of_updates(
        play(graphs(place), server, 1).server, play(EagerEngine(single), server, 1).server, server
    )
    assert apart > 1e-3


class Remembering(Rule):
    """Sums over images that depend on what the client kept, and on the round's start."""

    adds_up: ClassVar[bool] = True

    def start_client(self, weights):
        return {"visits": torch.zeros((), dtype=torch.float64)}

    def sums(self, local, images, labels):
        first, frozen = next(iter(local.start.values())), local.global_model(images).logits.detach()
        return {"sum": (local.state["visits"] + images.sum() + first.sum() + frozen.sum()) * len(images)}

    def finish(self, local, sums):
        local.state["visits"] = local.state["visits"] + 1
        return sums


@pytest.mark.parametrize(
    ("name", "rule", "what"),
    [
        ("spherefed", None, (CLOSE,)),
        ("fedcurv", None, FINISH),
        ("fedlgt", None, "score"),
        ("fedavg", Remembering(), FINISH),
    ],
)
def test_what_is_captured_once_does_the_same_for_every_client_and_round(name, rule, what, monkeypatch):
    # A replayed graph reads and writes where it did when it was captured: here, what was given first is done again.
    monkeypatch.setattr(Lane, "do", lambda lane, key, work: lane.graphs.setdefault(key, work)())
    monkeypatch.setattr("fednca.engines.local_update.FINISH_BATCH", 16)
    place, server = start(tiny(**UNEQUAL, method__name=name, train__precision="float64", evaluate__batch_size=16))
    place = replace(place, method=replace(place.method, rule=rule or place.method.rule))
    engine = graphs(place)
    assert_agree(play(engine, server, 3), play(EagerEngine(place), server, 3), atol=1e-8)
    assert (what, 16) in {key[:2] for key in engine.passes.lane.graphs}


@pytest.mark.parametrize(("name", "what"), [("spherefed", (CLOSE,)), ("fedcurv", FINISH)])
def test_sums_that_cannot_be_captured_are_added_up_without_graphs(name, what, monkeypatch):
    place, server = start(tiny(**UNEQUAL, method__name=name, train__precision="float64"))
    expected = play(EagerEngine(place), server, 2)
    done, do = [], Lane.do

    def refuse(self, key, work):
        done.append(key)
        if isinstance(key, tuple) and key[0] == what:
            raise RuntimeError("operation not permitted when stream is capturing")
        do(self, key, work)

    monkeypatch.setattr(Lane, "do", refuse)
    assert_agree(play(graphs(place), server, 2), expected, atol=1e-8)
    assert sum(isinstance(key, tuple) and key[0] == what for key in done) == 1  # it is tried once


def test_what_is_done_without_graphs_is_told():
    drawing = {"method__name": "fedcurv", "method__learner": "fedlgt"}  # whose loss draws
    notes = [graphs(start(tiny(**changes))[0]).note for changes in ({"method__name": "fedcurv"}, drawing)]
    told = ["what follows a client's last step is done without" in note for note in notes]
    assert told == [False, True]


def test_more_images_than_were_foreseen_are_scored():
    place, server = start(tiny(**UNEQUAL, train__precision="float64"))
    few = Shard(place.val.store, place.val.rows[:2], place.val.labels[:2])
    engine = graphs(replace(place, val=few, test=few), 1)
    assert len(engine.passes.rows) == 2
    found = [engine.predict(server.weights, shard, 16) for shard in (place.val, place.test)]
    expected = [EagerEngine(place).predict(server.weights, shard, 16) for shard in (place.val, place.test)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_a_centralized_run_goes_on_from_either_engines_optimiser():
    place, server = start(tiny(method__name="centralized", train__precision="float64"))
    half = play(EagerEngine(place), server, 1)
    ours = play(graphs(place), server, 1)
    assert_agree(ours, half, atol=1e-8)
    whole = play(EagerEngine(place), half.server, 1, half.states, first=2)
    assert_agree(play(graphs(place), half.server, 1, half.states, first=2), whole, atol=1e-8)
    assert_agree(play(EagerEngine(place), ours.server, 1, ours.states, first=2), whole, atol=1e-8)


def test_earlier_results_stay_as_they_are():
    place, server = start(tiny(**UNEQUAL))
    engine = graphs(place)
    first = [result.update.weights for result in engine.train(1, [0, 1], server, {})]
    kept = [{name: tensor.clone() for name, tensor in weights.items()} for weights in first]
    list(engine.train(2, [0, 1], Server(average(first, [0.5, 0.5])), {}))
    for weights, copy in zip(first, kept, strict=True):
        torch.testing.assert_close(dict(weights), copy, rtol=0, atol=0)


def test_states_wait_on_the_host_where_not_all_clients_train():
    place, server = start(tiny(**UNEQUAL, method__name="scaffold", train__precision="float64"))
    engine = graphs(place, states_on_device=False)
    assert_agree(play(engine, server, 2), play(EagerEngine(place), server, 2), atol=1e-8, state_atol=1e-5)


class Unused(nn.Module):
    """A head with a weight that no loss depends on."""

    def __init__(self, head):
        super().__init__()
        self.head, self.spare = head, nn.Linear(1, 1)

    def forward(self, feature_map):
        return self.head(feature_map)


def test_weights_that_no_loss_depends_on_decay_as_with_a_gradient_of_zero():
    place, _ = start(tiny(train__precision="float64"))
    place.model.head = Unused(place.model.head).double()
    server = Server({name: tensor.clone() for name, tensor in place.model.state_dict().items()})
    (found,) = graphs(place).train(1, [0], server, {})
    (expected,) = EagerEngine(place).train(1, [0], server, {})
    torch.testing.assert_close(dict(found.update.weights), expected.update.weights, rtol=0, atol=1e-8)
    spare, config = server.weights["head.spare.weight"], place.config.train
    decayed = spare * (1 - config.lr * config.weight_decay) ** expected.update.steps
    torch.testing.assert_close(expected.update.weights["head.spare.weight"], decayed)
    assert not torch.equal(decayed, spare)


def test_a_model_whose_layers_share_a_weight_is_left_to_the_eager_engine():
    place, _ = start(tiny())
    place.model.head = Unused(place.model.head)
    graphs(place)  # as it is, graphs take it
    place.model.head.again = place.model.head.spare
    with pytest.raises(UnfitEngineError, match="share a weight"):
        graphs(place)


def test_graphs_without_a_gpu_are_refused_in_one_sentence():
    place, _ = start(tiny(engine="graphs"))
    with pytest.raises(FedncaError, match="engine 'graphs' cannot be used: CUDA graphs need a CUDA device"):
        select_engine(place)


def test_every_client_is_dealt_once_and_no_slot_waits_for_long():
    steps = {client: 1 + client * 7 % 23 for client in range(40)}
    queues = spread(steps, 6)
    assert sorted(client for queue in queues for client in queue) == list(range(40))
    loads = [sum(steps[client] for client in queue) for queue in queues]
    assert max(loads) - min(loads) <= max(steps.values())


def some_tensors(seed):
    rng = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 2, 5, 4, generator=rng),
        "count": torch.tensor(seed),
        "b": torch.randn(7, generator=rng),
        "c": torch.randn((), generator=rng),
    }


def test_packed_tensors_are_the_tensors_and_their_average_is_theirs():
    plain = [some_tensors(seed) for seed in range(3)]
    layout = Layout.of(plain[0], first=["b"])
    packed = [Packed.zeros(layout, torch.device("cpu")) for _ in plain]
    for room, tensors in zip(packed, plain, strict=True):
        room.load(tensors)
        torch.testing.assert_close(dict(room), {name: tensors[name] for name in room}, rtol=0, atol=0)
    assert next(iter(packed[0])) == "b"
    assert packed[0]["a"].is_contiguous(memory_format=torch.channels_last)
    assert packed[0]["a"].untyped_storage().data_ptr() == packed[0]["b"].untyped_storage().data_ptr()
    shares = [0.2, 0.3, 0.5]
    found, expected = average(packed, shares), average(plain, shares)
    assert isinstance(found, Packed)
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=0)
    copy = Packed.zeros(layout, torch.device("cpu"))
    copy.load(found)
    torch.testing.assert_close(dict(copy), dict(found), rtol=0, atol=0)


def test_a_packed_dict_that_was_changed_counts_as_a_dict():
    packed = Packed.zeros(Layout.of(some_tensors(0)), torch.device("cpu"))
    packed.load(some_tensors(0))
    other = packed.clone()
    packed["b"] = torch.full((7,), 5.0)
    assert not packed.follows(packed.layout)
    other.load(packed)
    assert other["b"].tolist() == [5.0] * 7
    assert average([packed, packed], [0.5, 0.5])["b"].tolist() == [5.0] * 7


def test_flat_keeps_every_number_once():
    tensors = list(some_tensors(1).values())
    assert sorted(join(tensors).tolist()) == sorted(number for each in tensors for number in each.flatten().tolist())
