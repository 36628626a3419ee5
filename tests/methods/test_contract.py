"""Every method of the registry keeps the contract; and a method that uses all of it gets all of it."""

import pytest
import torch
from helpers import Stop, StopAfter, tiny

from fednca.methods import find_method, method_names
from fednca.methods.contract import About, Closing, Method, Rule, Server
from fednca.methods.fedavg import LinearLearner
from fednca.runs import resume, train


def last_weights(run):
    return run.state("last").server.weights


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", method_names())
def test_every_method_learns_repeats_itself_and_survives_an_interruption(name, tmp_path):
    config = tiny(method__name=name, train__rounds=10, train__participation=0.7)
    run = train(config, tmp_path / "a")
    losses = [sum(record["losses"].values()) for record in run.history]
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(tensor).all() for tensor in last_weights(run).values())

    assert_same(last_weights(train(config, tmp_path / "b")), last_weights(run))

    with pytest.raises(Stop):
        train(config, tmp_path / "c", [StopAfter(4)])
    assert_same(last_weights(resume(tmp_path / "c")), last_weights(run))


@pytest.mark.parametrize("learner", ["fednca-ml", "fedlgt", "ml-decoder", "spherefed", "fedetf"])
@pytest.mark.parametrize("rule", ["fedprox", "fedcurv", "scaffold", "fedadam", "centralized"])
def test_every_rule_trains_every_learner(rule, learner, tmp_path):
    run = train(tiny(method__name=rule, method__learner=learner, train__rounds=2), tmp_path / "run")
    assert run.finished
    assert run.config.method.learner_options
    own = {"fednca-ml": {"bce", "neg", "pos"}, "spherefed": {"mse"}}.get(learner, {"bce"})
    penalty = {"fedprox": {"prox"}, "fedcurv": {"curv"}}.get(rule, set())
    assert set(run.history[1]["losses"]) == own | penalty


@pytest.mark.parametrize("learner", ["fedavg", "fednca-ml", "fedlgt", "ml-decoder", "fedetf"])
@pytest.mark.parametrize("criterion", ["balanced", "asl"])
def test_every_criterion_works_with_every_head(criterion, learner, tmp_path):
    plain = train(tiny(method__name=learner, train__rounds=1), tmp_path / "plain").history[0]["losses"]
    config = tiny(method__name=learner, method__criterion=criterion, train__rounds=1)
    other = train(config, tmp_path / "other").history[0]["losses"]
    assert plain.keys() == other.keys()
    assert plain["bce"] != other["bce"]


@pytest.mark.parametrize("name", method_names())
def test_every_method_and_option_is_described(name):
    found = find_method(name)
    assert found.name == name
    assert found.about.formula
    assert [each for each in method_names() if find_method(each).about.summary == found.about.summary] == [name]
    for part in found.parts.values():
        assert [option for option, field in type(part).model_fields.items() if not field.description] == []


class EveryLoss(LinearLearner):
    """Compares with the model that the update began with."""

    def losses(self, model, images, labels, local):
        frozen, live = local.global_model(images).logits, model(images).logits
        assert not frozen.requires_grad
        if local.steps == 0:  # BatchNorm apart, live and frozen model are still the same
            assert_same(local.global_model.state_dict()["head.linear.weight"], local.weights["head.linear.weight"].data)
        return {
            "bce": super().losses(model, images, labels, local)["bce"],
            "near": 0.1 * (live - frozen).square().mean(),
        }


class EveryStep(Rule):
    """Uses every part of a rule in a way that can be counted."""

    adds_up = True

    def start_server(self, weights, clients):
        return {"rounds": torch.zeros(()), "images": torch.zeros(clients)}

    def start_client(self, weights):
        assert all(weight.requires_grad for weight in weights.values())
        return {"visits": torch.zeros(())}

    def send(self, server):
        return {"rounds": server.state["rounds"]}

    def penalties(self, local):
        assert not any("running" in name for name in local.weights)
        return {"prox": sum((w - local.start[name]).square().sum() for name, w in local.weights.items()) / 2}

    def correct(self, local):
        local.weights["head.linear.bias"].zero_()

    def sums(self, local, images, labels):
        return {"images": torch.ones(len(images)).sum()}

    def finish(self, local, sums):
        assert local.received["rounds"] == local.round - 1
        assert local.samples == sums["images"]
        local.state["visits"] = local.state["visits"] + 1
        return {"images": sums["images"]}

    def combine(self, server, updates, shares, clients):
        assert clients == 3
        images = server.state["images"].clone()
        for update in updates:
            images[update.client] += update.extra["images"]
        averaged = super().combine(server, updates, shares, clients)
        return Server(averaged.weights, {"rounds": server.state["rounds"] + 1, "images": images})


class CountPositives(Closing):
    """Counts each class's positives into the bias."""

    def sums(self, model, images, labels, asked):
        assert not model.training
        return {"positives": labels.sum(0)}

    def close(self, server):
        total = yield {}
        return Server(server.weights | {"head.linear.bias": total["positives"]}, server.state)


EVERYTHING = Method("everything", About("", "", ""), EveryLoss(), EveryStep(), CountPositives())


def test_a_method_that_uses_the_whole_contract_is_served_before_and_after_a_resume(tmp_path):
    config = tiny(method__name=f"{__name__}:EVERYTHING", train__rounds=5, train__participation=0.7)
    with pytest.raises(Stop):
        train(config, tmp_path / "run", [StopAfter(2)])
    run = resume(tmp_path / "run")

    state = run.state("last")
    took_part = [sum(str(k) in record["clients"] for record in run.history) for k in range(3)]
    sizes = [len(rows) for rows in run.federation.train.partition.clients]
    assert sorted(took_part) != [5, 5, 5]
    assert state.server.state["rounds"] == 5
    assert state.server.state["images"].tolist() == [n * size for n, size in zip(took_part, sizes, strict=True)]
    assert {k: int(own["visits"]) for k, own in state.clients.items()} == {k: n for k, n in enumerate(took_part) if n}
    assert set(run.history[0]["losses"]) == {"bce", "near", "prox"}
    assert state.server.weights["head.linear.bias"].abs().max() == 0

    closed = run.state("final").server.weights["head.linear.bias"]
    labels = run.federation.train.union()[1]
    assert closed.tolist() == labels.sum(axis=0).tolist()
    assert all(result["test"] in [record["test"] for record in run.history] for result in run.results.values())
