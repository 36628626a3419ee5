"""Parts of several methods together: which go, which are refused, and what a closing makes of another rule's model."""

import copy
import dataclasses
import math

import closing_cases
import numpy as np
import pytest
import torch
from helpers import pooled_features, tiny
from parity import start
from pydantic import ValidationError

from fednca.base.errors import FedncaError
from fednca.cli.app import main
from fednca.engines.eager import EagerEngine
from fednca.engines.processes import ProcessEngine
from fednca.methods import create_method, find_method, method_names
from fednca.methods.contract import options_of
from fednca.methods.fedavg import LinearLearner
from fednca.methods.fedprox import Proximal
from fednca.methods.spherefed import ClosedForm, SphereLearner
from fednca.models.etf import orthonormal_rows
from fednca.runs import Run, resume, train


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- what no part reads, and what does not go together -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--method scaffold --learner fednca-ml --method.head mlp", "not known; did you mean '--learner.head'?"),
        ("--method scaffold --learner fednca-ml --method.etf-seed 1", "not known; did you mean '--learner.etf-seed'?"),
        ("--method fedprox --learner fednca-ml --method.nu 1", "'nu' is not known (known: mu)"),
        ("--method fedprox --learner fednca-ml --learner.mu 1", "option of fednca-ml 'mu' is not known"),
        ("--method spherefed --closing none --method.ridge 0.1", "option of spherefed 'ridge' is not known"),
        ("--method spherefed --closing spherefed --method.ridge 0.1", "not known; did you mean '--closing.ridge'?"),
        ("--method spherefed --closing spherefed --closing.target shifted", "did you mean '--method.target'?"),
        ("--method scaffold --learner.tau 0.5", "no --learner is given; the method's own are --method.NAME"),
        ("--method spherefed --closing.ridge 0.1", "no --closing is given"),
        ("--method spherefed --closing none --closing.ridge 0.1", "no --closing is given"),
        ("--method fedprox --closing spherefed", "or --closing none"),
        ("--method spherefed --learner fednca-ml", "or --closing none"),
        ("--method fedprox --closing fedavg", "method 'fedavg' has no closing (known: spherefed, none)"),
        ("--method fedprox --closing sphere", "method 'sphere' is not known; did you mean 'spherefed'?"),
        ("--method fedprox --closing None", "method 'None' is not known"),
        ("--method spherefed --criterion asl", "'spherefed' has a loss of its own in place of BCE"),
        ("--method fedprox --learner spherefed --criterion asl", "'spherefed' has a loss of its own in place of BCE"),
    ],
)
def test_a_wrong_combination_is_one_sentence_of_the_command_line(words, sentence, tmp_path, capsys):
    assert main(["run", "demo", *words.split(), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fednca: ")
    assert told.count("\n") == 1
    assert sentence in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"name": "scaffold", "learner": "fednca-ml", "options": {"head": "mlp"}},
            r"setting 'method\.options\.head' is not known",
        ),
        ({"name": "scaffold", "learner_options": {"tau": 0.5}}, r"method\.learner_options has options"),
        ({"name": "spherefed", "closing_options": {"ridge": 0.5}}, r"method\.closing_options has options"),
        (
            {"name": "spherefed", "closing": "none", "closing_options": {"ridge": 0.5}},
            r"method\.closing_options has options",
        ),
        (
            {"name": "spherefed", "closing": "none", "options": {"ridge": 0.5}},
            r"setting 'method\.options\.ridge' is not known; did you mean 'method\.options\.",
        ),
    ],
)
def test_a_wrong_combination_in_a_file_is_one_sentence(changes, sentence, tmp_path, capsys):
    config = tiny(**{f"method__{name}": value for name, value in changes.items()})
    with pytest.raises(FedncaError, match=sentence):
        create_method(config)
    (tmp_path / "mine.toml").write_text(config.to_toml())
    assert main(["run", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- parts are frozen, and each option has one reader ------------------------------------------------------------------


@pytest.mark.parametrize("name", method_names())
def test_parts_and_methods_are_frozen(name):
    method = find_method(name)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)
    for part in method.parts.values():
        for attribute in (*type(part).model_fields, "something_else"):
            with pytest.raises(ValidationError):
                setattr(part, attribute, 1)


def test_a_chosen_method_leaves_the_one_of_the_registry_as_it_was():
    before = {name: copy.deepcopy(find_method(name)) for name in method_names()}
    chosen = {"method__name": "fedprox", "method__learner": "spherefed", "method__closing": "spherefed"}
    options = {"options": {"mu": 3.0}, "learner_options": {"target": "shifted"}, "closing_options": {"ridge": 0.5}}
    created = create_method(tiny(**chosen, **{f"method__{place}": own for place, own in options.items()}))
    assert created.learner == SphereLearner(target="shifted")
    assert created.rule == Proximal(mu=3.0)
    assert created.closing == ClosedForm(ridge=0.5)
    create_method(tiny(method__name="fednca-ml", method__criterion="asl"))  # which also decides what was left open
    assert {name: find_method(name) for name in method_names()} == before


@pytest.mark.parametrize("name", method_names())
def test_an_option_belongs_to_one_part(name):
    options = [option for part in find_method(name).parts.values() for option in options_of(part)]
    assert len(options) == len(set(options))


# -- closings ----------------------------------------------------------------------------------------------------------

CALIBRATED = {"method__learner": "spherefed", "method__closing": "spherefed", "train__rounds": 2}


def test_a_closing_calibrates_another_rules_model_as_it_does_its_own(tmp_path):
    # without its penalty, FedProx is the plain averaging of SphereFed
    own = train(tiny(method__name="spherefed", train__rounds=2), tmp_path / "own")
    other = train(tiny(method__name="fedprox", method__options={"mu": 0.0}, **CALIBRATED), tmp_path / "other")
    assert_same(other.state("final").server.weights, own.state("final").server.weights)
    assert [record["test"] for record in other.history] == [record["test"] for record in own.history]
    assert other.config.method.options == {"mu": 0.0}
    assert other.config.method.learner_options.keys() == {"target", "classifier_seed"}
    assert other.config.method.closing_options == {"ridge": 1e-3}


def test_a_closing_regresses_the_labels_on_another_rules_features(tmp_path):
    options = {"method__options": {"mu": 5.0}, "method__closing_options": {"ridge": 0.5}}
    run = train(tiny(method__name="fedprox", **CALIBRATED, **options), tmp_path / "run")
    Z, Y = pooled_features(run)
    augmented = np.concatenate([Z, math.sqrt(0.5) * np.eye(64)]), np.concatenate([Y, np.zeros((64, 10))])
    expected = np.linalg.lstsq(*augmented, rcond=None)[0].T
    np.testing.assert_allclose(run.state("final").server.weights["head.weight"], expected, rtol=1e-3, atol=1e-4)
    assert set(run.history[1]["losses"]) == {"mse", "prox"}


def test_none_leaves_the_model_as_it_was_trained(tmp_path, config):
    words = ["--method", "spherefed", "--closing", "none", "--method.target", "shifted"]
    assert main(["run", config, *words, "--out", str(tmp_path / "run")]) == 0
    run = Run(tmp_path / "run")
    assert run.config.method.closing == "none"
    assert run.config.method.options == {"target": "shifted", "classifier_seed": 0}
    assert run.method.closing is None
    assert torch.equal(run.state("final").server.weights["head.weight"], orthonormal_rows(10, 64, 0, "sphere") / 2)

    closed = train(run.config.replace({"method.closing": None}), tmp_path / "closed")
    assert closed.method.closing == ClosedForm()
    assert_same(closed.state("last").server.weights, run.state("last").server.weights)
    assert not torch.equal(*(each.state("final").server.weights["head.weight"] for each in (closed, run)))


@pytest.mark.parametrize("engine", ["eager", "processes"])
def test_a_second_exchange_asks_with_what_came_of_the_first(engine, tmp_path):
    changes = {"method__name": "fedprox", "train__rounds": 2, "engine": engine, "workers": 2}
    closing = {"method__closing": closing_cases.NAME, "method__closing_options": {"epsilon": 0.01}}
    run = train(tiny(**changes, **closing), tmp_path / "closed")
    until_best = changes | {"train__rounds": run.results["val"]["round"]}
    trained = train(tiny(**until_best), tmp_path / "trained").state("last").server.weights
    features, _ = pooled_features(run)
    closing_cases.assert_standardized(run.state("final").server.weights, trained, features, epsilon=0.01)
    assert run.config.method.closing_options == {"epsilon": 0.01}


@pytest.mark.parametrize("build", [EagerEngine, lambda place: ProcessEngine(place, 2)], ids=["eager", "processes"])
def test_each_exchange_totals_what_all_clients_add_up(build):
    place, server = start(tiny(method__name=closing_cases.NAME))
    place.model.load_state_dict(server.weights)
    with torch.no_grad():
        features = [place.model.eval()(next(iter(shard.batches(1000)))[0]).features for shard in place.train]
    Z = torch.cat(features).double().numpy()
    engine, asked = build(place), torch.linspace(-1, 1, 64, dtype=torch.float64)
    try:
        first, second = engine.sums(1, server, {}), engine.sums(1, server, {"mean": asked})
    finally:
        engine.close()
    assert first.left_out == second.left_out == {}
    assert first.sums["images"] == len(Z)
    np.testing.assert_allclose(first.sums["features"], Z.sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(second.sums["squares"], ((Z - asked.numpy()) ** 2).sum(axis=0), rtol=1e-5)


# -- runs of older versions --------------------------------------------------------------------------------------------


def test_a_run_whose_config_holds_options_of_a_replaced_learner_is_read_and_goes_on(tmp_path):
    config = tiny(method__name="fedprox", method__learner="fednca-ml", method__options={"mu": 0.5}, train__rounds=2)
    run = train(config, tmp_path / "run")
    weights, file = run.state("last").server.weights, tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("mu = 0.5", 'mu = 0.5\nhead = "linear"'))

    old = Run(tmp_path / "run")
    assert old.config == run.config
    assert old.method == run.method
    assert old.method.rule == Proximal(mu=0.5)
    assert_same(old.model().state_dict(), run.model().state_dict())
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 3"))
    longer = resume(tmp_path / "run").state("last").server.weights
    assert_same(longer, train(config.replace({"train.rounds": 3}), tmp_path / "longer").state("last").server.weights)
    assert not torch.equal(longer["head.ladm.attention.in_proj_weight"], weights["head.ladm.attention.in_proj_weight"])


def test_a_run_whose_config_holds_options_of_nobody_is_refused(tmp_path):
    run = train(tiny(method__name="fedprox", method__options={"mu": 0.5}, train__rounds=1), tmp_path / "run")
    assert type(run.method.learner) is LinearLearner
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("mu = 0.5", "mu = 0.5\nlambda1 = 1.0"))
    with pytest.raises(FedncaError, match=r"setting 'method\.options\.lambda1' is not known"):
        _ = Run(tmp_path / "run").method
