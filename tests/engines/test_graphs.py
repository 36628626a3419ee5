"""The steps of the graph engine, done without graphs on a CPU, against the eager engine; on a GPU: tests/gpu."""

import pytest
import torch
from helpers import tiny
from parity import assert_agree, distance_of_updates, play, start
from torch import nn

from fednca.base.errors import FedncaError, UnfitEngineError
from fednca.base.tensors import Layout, Packed, join
from fednca.engines.graphs.engine import GraphEngine, spread
from fednca.engines.graphs.lanes import Lane
from fednca.engines.images import Shard
from fednca.engines.select import select_engine
from fednca.methods import method_names
from fednca.methods.contract import Server, average
from fednca.methods.fedavg import FedAvg
from fednca.methods.fedcurv import FedCurv
from fednca.methods.fedlgt import FedLGT
from fednca.methods.spherefed import SphereFed

UNEQUAL = {"partition__beta": 0.3, "partition__clients": 4}  # sizes that end in partial batches


def graphs(job, slots=2, **options):
    return GraphEngine(job.engine, [job.val, job.test], slots, **options)


def both(rounds=2, **changes):
    job, server = start(tiny(**UNEQUAL, **changes))
    eager = play(job, job.engine, server, rounds)
    return play(job, graphs(job), server, rounds), eager


def test_the_federation_of_these_tests_has_unequal_clients_and_partial_batches():
    job, _ = start(tiny(**UNEQUAL))
    sizes = [len(shard) for shard in job.train]
    assert len(set(sizes)) > 1
    assert any(size % job.config.train.batch_size for size in sizes)


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


def cut(job, *sizes):
    """Deal all images anew, so many to each client."""
    store = job.train[0].store
    rows, labels = (torch.cat([getattr(shard, name) for shard in job.train]) for name in ("rows", "labels"))
    pieces = (torch.split(each[: sum(sizes)], sizes) for each in (rows, labels))
    job.train[:] = [Shard(store, *own) for own in zip(*pieces, strict=True)]


@pytest.mark.parametrize("name", method_names())
def test_clients_of_very_different_sizes_agree_with_the_eager_engine(name):
    job, server = start(tiny(method__name=name, partition__clients=4, train__precision="float64", train__batch_size=8))
    cut(job, 1, 2, 9, 16)
    expected = play(job, job.engine, server, 2)
    found = play(job, graphs(job), server, 2)
    assert {result.update.samples for result in found.results} == {1, 2, 9, 16}
    assert_agree(found, expected, atol=1e-8, state_atol=1e-8 if name != "scaffold" else 1e-5)


def test_memory_is_planned_with_the_largest_batch_of_any_client(monkeypatch):
    job, _ = start(tiny(partition__clients=2, train__batch_size=8))
    cut(job, 9, 16)  # whose batches have 9 images, and 8
    planned = []
    monkeypatch.setattr(GraphEngine, "_plan", lambda self, wanted, largest: planned.append(largest) or wanted)
    graphs(job)
    assert planned == [9]


@pytest.mark.parametrize("name", ["fedavg", "fednca-ml", "fedprox", "scaffold", "fedlgt"])
@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-3), ("bf16", 5e-2)])
def test_a_round_in_coarser_arithmetic_is_the_same_up_to_rounding(name, precision, near):
    job, server = start(tiny(**UNEQUAL, method__name=name, train__precision=precision))
    # from fresh weights, AdamW would turn gradients that are nothing but rounding into whole steps
    before = play(job, job.engine, server, 3)
    expected = play(job, job.engine, before.server, 1, before.states, first=4)
    found = play(job, graphs(job), before.server, 1, before.states, first=4)
    assert distance_of_updates(found.server, expected.server, before.server) < near


def test_bf16_is_not_float32():
    job, server = start(tiny(**UNEQUAL, train__precision="bf16"))
    single, _ = start(tiny(**UNEQUAL))
    apart = distance_of_updates(
        play(job, graphs(job), server, 1).server, play(single, single.engine, server, 1).server, server
    )
    assert apart > 1e-3


class Remembering(FedAvg):
    """Sums over images that depend on what the client kept, and on the round's start."""

    def start_client(self, weights):
        return {"visits": torch.zeros((), dtype=torch.float64)}

    def finish_sums(self, local, images, labels):
        first, frozen = next(iter(local.start.values())), local.global_model(images).logits.detach()
        return {"sum": (local.state["visits"] + images.sum() + first.sum() + frozen.sum()) * len(images)}

    def finish(self, local, sums):
        local.state["visits"] = local.state["visits"] + 1
        return sums


@pytest.mark.parametrize(
    ("method", "what"),
    [(SphereFed, "close"), (FedCurv, "finish"), (FedLGT, "score"), (Remembering, "finish")],
)
def test_what_is_captured_once_does_the_same_for_every_client_and_round(method, what, monkeypatch):
    # A replayed graph reads and writes where it did when it was captured: here, what was given first is done again.
    monkeypatch.setattr(Lane, "do", lambda lane, key, work: lane.graphs.setdefault(key, work)())
    monkeypatch.setattr("parity.create_method", lambda config: method())
    monkeypatch.setattr("fednca.engines.local_update.FINISH_BATCH", 16)
    job, server = start(tiny(**UNEQUAL, train__precision="float64", evaluate__batch_size=16))
    engine = graphs(job)
    assert_agree(play(job, engine, server, 3), play(job, job.engine, server, 3), atol=1e-8)
    assert (what, 16) in {key[:2] for key in engine.judge.lane.graphs}


@pytest.mark.parametrize(("name", "what"), [("spherefed", "close"), ("fedcurv", "finish")])
def test_sums_that_cannot_be_captured_are_added_up_without_graphs(name, what, monkeypatch):
    job, server = start(tiny(**UNEQUAL, method__name=name, train__precision="float64"))
    expected = play(job, job.engine, server, 2)
    done, do = [], Lane.do

    def refuse(self, key, work):
        done.append(key)
        if isinstance(key, tuple) and key[0] == what:
            raise RuntimeError("operation not permitted when stream is capturing")
        do(self, key, work)

    monkeypatch.setattr(Lane, "do", refuse)
    assert_agree(play(job, graphs(job), server, 2), expected, atol=1e-8)
    assert sum(isinstance(key, tuple) and key[0] == what for key in done) == 1  # it is tried once


def test_what_is_done_without_graphs_is_told():
    drawing = {"method__name": "fedcurv", "method__learner": "fedlgt"}  # whose loss draws
    notes = [graphs(start(tiny(**changes))[0]).note for changes in ({"method__name": "fedcurv"}, drawing)]
    told = ["what follows a client's last step is done without" in note for note in notes]
    assert told == [False, True]


def test_more_images_than_were_foreseen_are_scored():
    job, server = start(tiny(**UNEQUAL, train__precision="float64"))
    engine = GraphEngine(job.engine, [], 1)
    found = [engine.predict(server.weights, shard, 16) for shard in (job.val, job.test)]
    expected = [job.engine.predict(server.weights, shard, 16) for shard in (job.val, job.test)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_a_centralized_run_goes_on_from_either_engines_optimiser():
    job, server = start(tiny(method__name="centralized", train__precision="float64"))
    half = play(job, job.engine, server, 1)
    ours = play(job, graphs(job), server, 1)
    assert_agree(ours, half, atol=1e-8)
    whole = play(job, job.engine, half.server, 1, half.states, first=2)
    assert_agree(play(job, graphs(job), half.server, 1, half.states, first=2), whole, atol=1e-8)
    assert_agree(play(job, job.engine, ours.server, 1, ours.states, first=2), whole, atol=1e-8)


def test_earlier_results_stay_as_they_are():
    job, server = start(tiny(**UNEQUAL))
    engine = graphs(job)
    first = [result.update.weights for result in engine.train(1, [0, 1], server, {})]
    kept = [{name: tensor.clone() for name, tensor in weights.items()} for weights in first]
    list(engine.train(2, [0, 1], Server(average(first, [0.5, 0.5])), {}))
    for weights, copy in zip(first, kept, strict=True):
        torch.testing.assert_close(dict(weights), copy, rtol=0, atol=0)


def test_states_wait_on_the_host_where_not_all_clients_train():
    job, server = start(tiny(**UNEQUAL, method__name="scaffold", train__precision="float64"))
    engine = graphs(job, states_on_device=False)
    assert_agree(play(job, engine, server, 2), play(job, job.engine, server, 2), atol=1e-8, state_atol=1e-5)


class Unused(nn.Module):
    """A head with a weight that no loss depends on."""

    def __init__(self, head):
        super().__init__()
        self.head, self.spare = head, nn.Linear(1, 1)

    def forward(self, feature_map):
        return self.head(feature_map)


def test_weights_that_no_loss_depends_on_decay_as_with_a_gradient_of_zero():
    job, _ = start(tiny(train__precision="float64"))
    job.model.head = Unused(job.model.head).double()
    server = Server({name: tensor.clone() for name, tensor in job.model.state_dict().items()})
    (found,) = graphs(job).train(1, [0], server, {})
    (expected,) = job.engine.train(1, [0], server, {})
    torch.testing.assert_close(dict(found.update.weights), expected.update.weights, rtol=0, atol=1e-8)
    spare, config = server.weights["head.spare.weight"], job.config.train
    decayed = spare * (1 - config.lr * config.weight_decay) ** expected.update.steps
    torch.testing.assert_close(expected.update.weights["head.spare.weight"], decayed)
    assert not torch.equal(decayed, spare)


def test_a_model_whose_layers_share_a_weight_is_left_to_the_eager_engine():
    job, _ = start(tiny())
    job.model.head = Unused(job.model.head)
    graphs(job)  # as it is, graphs take it
    job.model.head.again = job.model.head.spare
    with pytest.raises(UnfitEngineError, match="share a weight"):
        graphs(job)


def test_graphs_without_a_gpu_are_refused_in_one_sentence():
    job, _ = start(tiny())
    config = tiny(engine="graphs")
    with pytest.raises(FedncaError, match="engine 'graphs' cannot be used: CUDA graphs need a CUDA device"):
        select_engine(config, job.method, job.model, job.train, [job.val, job.test], torch.device("cpu"))


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
