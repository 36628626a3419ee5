import json

import numpy as np
import pytest
from helpers import tiny

from fednca.base.errors import FedncaError
from fednca.data.federation import Federation
from fednca.report.facts import load_federations, page_facts
from fednca.report.groups import group_runs
from fednca.runs import Run


def describe(runs):
    groups = group_runs(runs)
    return json.loads(json.dumps(page_facts(groups, load_federations(groups)), allow_nan=False))


def lines(run):
    return [json.loads(line) for line in (run.folder / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def facts(runs):
    return describe(runs)


def test_curves_are_bands_over_the_seeds(facts, runs):
    both = [lines(run) for run in runs[:2]]
    group = facts["groups"][0]
    assert (group["label"], [run["seed"] for run in group["runs"]]) == ("fedavg", [0, 1])
    for name, band in group["curves"].items():
        part, metric = name.split(".")
        judged = [[record["calibrated"] if "calibrated" in metric else record for record in own] for own in both]
        values = np.array([[each[part][metric.removesuffix("_calibrated")] for each in own] for own in judged])
        assert band["x"] == [1, 2, 3]
        for key, expected in (("mean", values.mean(0)), ("low", values.min(0)), ("high", values.max(0))):
            np.testing.assert_allclose(band[key], expected, rtol=1e-5)
    assert {"test.macro_f1", "val.mean_ap", "test.macro_f1_calibrated"} < group["curves"].keys()
    seconds = np.array([[record["seconds"] for record in own] for own in both])
    np.testing.assert_allclose(group["seconds"], seconds.cumsum(axis=1).mean(axis=0), rtol=1e-5)
    nc1 = np.array([[record["collapse"]["nc1"] for record in own] for own in both])
    np.testing.assert_allclose(group["collapse"]["nc1"]["mean"], nc1.mean(axis=0), rtol=1e-5)
    loss = [np.mean([sum(own[n]["clients"]["2"].values()) for own in both]) for n in range(3)]
    np.testing.assert_allclose(group["clients"]["2"]["mean"], loss, rtol=1e-5)


def test_loss_terms_are_those_of_the_method(facts, runs):
    (group,) = (group for group in facts["groups"] if group["label"] == "fednca-ml")
    history = lines(runs[2])
    assert group["losses"].keys() == {"bce", "neg", "pos"}
    for term, band in group["losses"].items():
        np.testing.assert_allclose(band["mean"], [record["losses"][term] for record in history], rtol=1e-5)


def test_results_are_those_of_the_files(facts, runs):
    results = [json.loads((run.folder / "results.json").read_text()) for run in runs[:2]]
    for way, found in facts["groups"][0]["results"].items():
        own = [each[way] for each in results]
        assert found["rounds"] == [each["round"] for each in own]
        for metric, value in found["test"].items():
            numbers = [each["test"][metric] for each in own]
            assert value["mean"] == pytest.approx(np.mean(numbers), abs=1e-12)
            assert value["std"] == pytest.approx(np.std(numbers, ddof=1), abs=1e-12)
        for c in range(10):
            aucs = [each["test"]["class_auc"][c] for each in own]
            band = found["classes"]["class_auc"][c]
            assert [band["low"], band["high"]] == [min(aucs), max(aucs)]
    calibrated = [each["val"]["calibrated"]["test"] for each in results]
    found = facts["groups"][0]["results"]["val"]
    assert found["calibrated"]["macro_f1"]["mean"] == pytest.approx(np.mean([each["macro_f1"] for each in calibrated]))
    assert found["classes"]["calibrated_f1"][3]["high"] == max(each["class_f1"][3] for each in calibrated)


def test_the_setting_tells_what_the_clients_hold(facts, runs):
    (setting,) = facts["settings"]
    federation = runs[0].federation
    for k, row in enumerate(setting["counts"]):
        labels = federation.train.client(k)[1]
        assert row == [int((labels[:, c] == 1).sum()) for c in range(10)]
    assert setting["stacked"]["counts"] == setting["counts"]
    assert setting["report"]["clients"][1]["images"] == len(federation.train.partition.clients[1])
    assert facts["finished"]
    assert facts["differing"] == {}
    assert facts["shared"]["train.rounds"] == "3"


def test_methods_speak_for_themselves(facts):
    first, second = (group["methods"][0] for group in facts["groups"])
    assert first["formula"] == "w ← Σ_k w_k / K"
    assert second["paper"] == "FedNCA-ML"
    assert facts["groups"][1]["options"]["method.options.tau"] == "0.3"


def test_a_run_that_goes_on_is_described_as_far_as_it_is(open_run):
    facts = describe([open_run])
    (group,) = facts["groups"]
    assert not facts["finished"]
    assert (group["runs"][0]["rounds"], group["runs"][0]["of"]) == (2, 3)
    assert group["curves"]["test.macro_f1"]["x"] == [1, 2]
    assert group["collapse"]["nc1"]["x"] == []
    assert group["results"]["last"]["rounds"] == [2]
    reached = open_run.history[group["results"]["val"]["rounds"][0] - 1]["calibrated"]["test"]["macro_f1"]
    assert group["results"]["val"]["calibrated"]["macro_f1"]["mean"] == reached


def test_what_a_method_takes_from_others_is_shown_with_it(tmp_path):
    closed = {"method__learner": "spherefed", "method__closing": "spherefed", "method__closing_options": {"ridge": 0.5}}
    for name, taken in {"plain": {}, "closed": closed}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(tiny(method__name="fedprox", **taken).to_toml())
    facts = describe([Run(tmp_path / "plain"), Run(tmp_path / "closed")])
    assert facts["differing"] == {}
    assert {each["name"] for each in facts["groups"][1]["methods"]} == {"fedprox", "spherefed"}
    options = facts["groups"][1]["options"]
    assert (options["method.options.mu"], options["method.closing_options.ridge"]) == ("0.01", "0.5")
    assert options["method.learner_options.target"] == "scaled"


def test_a_run_that_has_only_a_config_is_described(tmp_path):
    (tmp_path / "config.toml").write_text(tiny().to_toml())
    facts = describe([Run(tmp_path)])
    assert facts["groups"][0]["results"] == {}
    assert "partition.npz" in facts["settings"][0]["missing"]


def test_data_that_is_gone_is_said_so(runs, monkeypatch):
    def gone(*_):
        raise FedncaError("the data are elsewhere")

    monkeypatch.setattr(Federation, "load", gone)
    (setting,) = describe([Run(runs[0].folder)])["settings"]
    assert setting["missing"] == "the data are elsewhere"
    assert setting["classes"][:2] == ["zero", "one"]


def test_settings_that_differ_are_listed_but_for_those_of_the_methods(tmp_path):
    runs = []
    for name, changes in {"a": {"train__lr": 0.5}, "b": {"method__name": "fedavg"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(tiny(**changes).to_toml())
        runs.append(Run(tmp_path / name))
    facts = describe(runs)
    assert facts["differing"] == {"train.lr": ["0.5", "0.001"]}
    assert "train.lr" not in facts["shared"]
