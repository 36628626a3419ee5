"""Clipping, noise and epsilon against Flower's own strategy and mod, and against the accountant's formula."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from helpers import tiny
from in_process import serve_until, settings_for, simulated
from parity import next_server, start

from fednca.base.errors import FedncaError, RunFailedError
from fednca.engines.eager import EagerEngine
from fednca.flower.config import PrivacyConfig
from fednca.flower.privacy import epsilon_after, noise_average, privatize_update
from fednca.flower.server import serve
from fednca.methods.contract import average
from fednca.runs import Run

NAMES = ["conv.weight", "head.bias"]


def draw(seed):
    rng = torch.Generator().manual_seed(seed)
    weights = {"conv.weight": torch.randn(3, 2, 2, 2, generator=rng), "head.bias": torch.randn(4, generator=rng)}
    buffers = {"bn.running_var": torch.rand(3, generator=rng), "bn.num_batches_tracked": torch.tensor(seed)}
    return weights | buffers


def record_of(tensors):
    return ArrayRecord({name: Array(tensors[name].numpy()) for name in NAMES})


def tensors_of(record):
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}


def test_central_clip_and_noise_are_those_of_flowers_strategy():
    start, updates = draw(0), [draw(1), draw(2), draw(3)]
    updates[2]["conv.weight"] = start["conv.weight"] + 1e-3  # one that is not clipped
    updates[2]["head.bias"] = start["head.bias"].clone()
    privacy = PrivacyConfig(mode="central", clip_norm=0.7, noise_multiplier=1.3)

    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.3, 0.7, num_sampled_clients=3)
    strategy.current_arrays = record_of(start)
    replies = []
    for update in updates:
        question = Message(RecordDict(), 1, "train")
        content = RecordDict({"arrays": record_of(update), "metrics": MetricRecord({"num-examples": 1})})
        replies.append(Message(content, reply_to=question))
    np.random.seed(0)
    theirs, _ = strategy.aggregate_train(1, replies)

    np.random.seed(0)
    clipped = [privatize_update(privacy, start, update, NAMES) for update in updates]
    mine = average(noise_average(privacy, clipped, NAMES), [1 / 3] * 3)
    torch.testing.assert_close({name: mine[name] for name in NAMES}, tensors_of(theirs), rtol=0, atol=1e-6)
    assert torch.equal(mine["bn.running_var"], average(updates, [1 / 3] * 3)["bn.running_var"])
    assert mine["bn.num_batches_tracked"].equal(torch.tensor(3))


def test_local_clip_and_noise_are_those_of_flowers_mod():
    start, update = draw(0), draw(1)
    privacy = PrivacyConfig(mode="local", clip_norm=0.7, noise_multiplier=0.5)
    deviation = 0.5 * 2 * 0.7  # any two clipped updates lie at most 2·0.7 apart
    delta = 1e-5
    mod = LocalDpMod(0.7, sensitivity=1.0, epsilon=np.sqrt(2 * np.log(1.25 / delta)) / deviation, delta=delta)
    question = Message(RecordDict({"arrays": record_of(start)}), 1, "train")
    reply = Message(RecordDict({"arrays": record_of(update)}), reply_to=question)
    np.random.seed(0)
    theirs = mod(question, Context(1, 1, {}, RecordDict(), {}), lambda message, context: reply)

    np.random.seed(0)
    mine = privatize_update(privacy, start, update, NAMES)
    torch.testing.assert_close(
        {name: mine[name] for name in NAMES}, tensors_of(theirs.content["arrays"]), rtol=0, atol=1e-6
    )
    for name in ("bn.running_var", "bn.num_batches_tracked"):
        assert torch.equal(mine[name], update[name])


def test_an_update_without_a_change_is_not_divided_by_its_norm():
    weights = draw(0)
    kept = privatize_update(PrivacyConfig(mode="central"), weights, weights, NAMES)
    torch.testing.assert_close(kept, weights, rtol=0, atol=0)


@pytest.mark.parametrize("releases", [1, 10])
@pytest.mark.parametrize("multiplier", [0.8, 4.0])
def test_epsilon_is_that_of_the_renyi_divergence_of_gaussians(releases, multiplier):
    privacy = PrivacyConfig(mode="central", noise_multiplier=multiplier, delta=1e-5)
    # Mironov, 2017: the divergence of order a is a·n / (2·z²); Canonne et al., 2020: from it to epsilon
    orders = np.concatenate([np.arange(1.01, 11, 0.01), np.arange(11, 513)])
    divergence = orders * releases / (2 * multiplier**2)
    bound = divergence + np.log1p(-1 / orders) - np.log(privacy.delta * orders) / (orders - 1)
    assert epsilon_after(privacy, releases) == pytest.approx(bound.min(), rel=0.02)
    assert epsilon_after(privacy, releases) >= bound.min() - 1e-9


def private(config, folder, **privacy):
    return settings_for(config, folder, privacy=PrivacyConfig(**privacy))


@pytest.mark.parametrize("mode", ["central", "local"])
@pytest.mark.parametrize("name", ["fednca-ml", "fedadam"])
def test_a_private_run_reports_its_epsilon(mode, name, tmp_path):
    config = tiny(method__name=name, train__rounds=2)
    settings = private(config, tmp_path, mode=mode, clip_norm=1.0, noise_multiplier=1e-3)
    run = Run(serve(simulated(), settings))
    spent = [record["privacy"]["epsilon"] for record in run.history]
    assert spent == [epsilon_after(settings.privacy, 1), epsilon_after(settings.privacy, 2)]
    assert run.results["val"]["privacy"] == {"mode": mode, "epsilon": spent[-1], "delta": 1e-5}


@pytest.mark.parametrize("mode", ["central", "local"])
def test_the_noise_of_a_run_is_as_large_as_it_should_be_and_spares_batchnorm(mode, tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1)
    place, server = start(config)
    results = list(EagerEngine(place).train(1, [0, 1, 2], server, {}))
    expected = next_server(place, server, results).weights
    settings = private(config, tmp_path, mode=mode, clip_norm=1e6, noise_multiplier=1e-6)  # clips nothing
    found = Run(serve(simulated(), settings)).state("last").server.weights

    trainable = {name for name, _ in place.model.named_parameters()}
    noise = torch.cat([(found[name] - expected[name]).flatten() for name in sorted(trainable)]).double()
    deviation = 1.0 / 3 if mode == "central" else 2.0 / 3**0.5  # of the average of three sites
    assert noise.std().item() == pytest.approx(deviation, rel=0.02)
    assert abs(noise.mean().item()) < 0.02
    for name in found.keys() - trainable:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def test_updates_are_not_taken_for_broken_by_the_noise_they_should_have(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1)
    run = Run(serve(simulated(), private(config, tmp_path, mode="local", noise_multiplier=100.0)))
    assert (len(run.history[0]["took_part"]), run.history[0]["left_out"]) == (3, {})


def test_a_run_ends_before_it_spends_more_than_allowed(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=5)
    limit = epsilon_after(PrivacyConfig(noise_multiplier=2.0), 2) + 0.01
    settings = private(config, tmp_path, mode="central", noise_multiplier=2.0, max_epsilon=limit)
    run = Run(serve(simulated(), settings))
    assert len(run.history) == 2
    assert run.finished
    assert run.results["last"]["privacy"]["epsilon"] <= limit


def test_the_last_round_that_privacy_allows_is_judged(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=5, evaluate__every=5)
    limit = epsilon_after(PrivacyConfig(noise_multiplier=2.0), 2) + 0.01
    run = Run(serve(simulated(), private(config, tmp_path, mode="central", noise_multiplier=2.0, max_epsilon=limit)))
    assert ["test" in record for record in run.history] == [False, True]
    assert run.results["val"]["round"] == 2


def test_a_run_that_nobody_judged_within_its_budget_says_what_to_raise(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=2)
    limit = epsilon_after(PrivacyConfig(noise_multiplier=2.0), 1) + 0.01
    settings = private(config, tmp_path, mode="central", noise_multiplier=2.0, max_epsilon=limit)
    grid = simulated()
    for node in grid.nodes.values():
        node.fault = lambda message, reply: None if message.metadata.message_type == "evaluate" else reply
    for resume in (False, True):
        with pytest.raises(RunFailedError, match=r"no model was judged .*; another round needs a higher max_epsilon"):
            serve(grid, settings.model_copy(update={"deadline": 2.0}), resume=resume)
    for node in grid.nodes.values():
        node.fault = lambda message, reply: reply
    more = settings.privacy.model_copy(update={"max_epsilon": None})
    assert Run(serve(grid, settings.model_copy(update={"privacy": more}), resume=True)).results["val"]


def test_a_run_that_could_not_play_a_single_round_is_refused(tmp_path):
    settings = private(tiny(method__name="fedavg"), tmp_path, mode="central", max_epsilon=0.01)
    with pytest.raises(FedncaError, match=r"max_epsilon is 0\.01, and one round spends"):
        serve(simulated(), settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change", [{"noise_multiplier": 50.0}, {"clip_norm": 0.1}, {"mode": "local"}, {"mode": "none"}]
)
def test_a_resumed_run_cannot_report_the_epsilon_of_another_noise(change, tmp_path):
    settings = private(tiny(method__name="fedavg", train__rounds=2), tmp_path, mode="central", noise_multiplier=0.1)
    grid = simulated()
    serve_until(grid, settings, 2)
    changed = settings.model_copy(update={"privacy": settings.privacy.model_copy(update=change)})
    with pytest.raises(FedncaError, match=r"began with mode = central, clip_norm = 1\.0, noise_multiplier = 0\.1"):
        serve(grid, changed, resume=True)
    stricter = settings.model_copy(update={"privacy": settings.privacy.model_copy(update={"delta": 1e-6})})
    run = Run(serve(grid, stricter, resume=True))
    assert run.results["last"]["privacy"]["epsilon"] == epsilon_after(stricter.privacy, 3)


def test_a_round_that_is_lost_has_cost_privacy_where_sites_add_the_noise(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=2)
    settings = private(config, tmp_path, mode="local", noise_multiplier=1.0)
    grid = simulated()
    serve_until(grid, settings, 1)
    run = Run(serve(grid, settings, resume=True))
    assert run.history[-1]["privacy"]["epsilon"] == epsilon_after(settings.privacy, 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method__name": "scaffold"}, "method 'scaffold' uploads c, c_k beside the weights"),
        ({"method__name": "fedcurv"}, "method 'fedcurv' uploads u_k, v_k beside the weights"),
        ({"method__name": "spherefed"}, "method 'spherefed' ends with exact sums"),
        ({"method__name": "fedavg", "train__weighting": "samples"}, "weighting 'samples' lets a large site"),
    ],
)
@pytest.mark.parametrize("mode", ["central", "local"])
def test_what_noise_does_not_cover_is_refused(changes, sentence, mode, tmp_path):
    with pytest.raises(FedncaError, match=sentence):
        serve(simulated(), private(tiny(**changes), tmp_path, mode=mode))
    assert not (tmp_path / "run").exists()
