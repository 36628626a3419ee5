"""Rows and seeds of a bench, as people write them."""

import closing_cases
import pytest
import torch

from fednca.base.errors import FedncaError
from fednca.bench.rows import parse_row, parse_rows, parse_seeds
from fednca.config import load_config
from fednca.measures.losses import balanced_bce, bce
from fednca.methods import create_method, method_names


@pytest.mark.parametrize(
    ("text", "canonical", "folder"),
    [
        ("fedavg", "fedavg", "fedavg"),
        ("fedprox:mu=0.10", "fedprox:mu=0.1", "fedprox_mu-0.1"),
        ("fedprox:mu=1e-7", "fedprox:mu=1e-07", "fedprox_mu-1e-07"),
        ("fednca-ml:lambda2=1,lambda1=none", "fednca-ml:lambda1=none,lambda2=1", "fednca-ml_lambda1-none_lambda2-1"),
        ("fednca-ml:train-etf=True", "fednca-ml:train_etf=true", "fednca-ml_train_etf-true"),
        ("scaffold@fednca-ml", "scaffold@fednca-ml", "scaffold@fednca-ml"),
        ("fedavg:criterion=asl", "fedavg:criterion=asl", "fedavg_criterion-asl"),
        (
            "fednca-ml:tau=0.5,criterion=balanced",
            "fednca-ml:criterion=balanced,tau=0.5",
            "fednca-ml_criterion-balanced_tau-0.5",
        ),
        (
            "fedprox@fednca-ml:learner.tau=0.5,mu=2",
            "fedprox@fednca-ml:mu=2,learner.tau=0.5",
            "fedprox@fednca-ml_mu-2_learner.tau-0.5",
        ),
        ("spherefed+none", "spherefed+none", "spherefed+none"),
        (
            "fedprox@spherefed+spherefed:closing.ridge=0.10,learner.target=shifted,mu=2,criterion=bce",
            "fedprox@spherefed+spherefed:criterion=bce,mu=2,learner.target=shifted,closing.ridge=0.1",
            "fedprox@spherefed+spherefed_criterion-bce_mu-2_learner.target-shifted_closing.ridge-0.1",
        ),
    ],
)
def test_a_row_is_written_in_one_way_and_read_back(text, canonical, folder):
    row = parse_row(text)
    assert (row.text, row.folder) == (canonical, folder)
    assert parse_row(row.text) == row


def test_what_a_row_sets():
    assert parse_row("fedprox@fednca-ml:mu=2,learner.tau=0.5").overrides == {
        "method.name": "fedprox",
        "method.learner": "fednca-ml",
        "method.closing": None,
        "method.options": {"mu": 2.0},
        "method.learner_options": {"tau": 0.5},
        "method.closing_options": {},
    }
    assert parse_row("fedprox@spherefed+spherefed:closing.ridge=0.1").overrides == {
        "method.name": "fedprox",
        "method.learner": "spherefed",
        "method.closing": "spherefed",
        "method.options": {},
        "method.learner_options": {},
        "method.closing_options": {"ridge": 0.1},
    }


def test_a_closing_from_outside_is_named_as_its_module_and_object():
    row = parse_row(f"fedprox+{closing_cases.NAME}:closing.epsilon=0.50,mu=2")
    assert row.text == f"fedprox+{closing_cases.NAME}:mu=2,closing.epsilon=0.5"
    assert parse_row(row.text) == row
    assert not set(row.folder) & set("/\\ :")
    method = create_method(load_config("demo", row.overrides))
    assert (method.rule.mu, method.closing.epsilon) == (2.0, 0.5)


def test_a_criterion_is_set_for_a_row_alone():
    row = parse_row("fedprox@fednca-ml:criterion=balanced,mu=2")
    assert row.overrides["method.criterion"] == "balanced"
    assert row.overrides["method.options"] == {"mu": 2.0}
    assert "method.criterion" not in parse_row("fedavg").overrides  # where it is left to the bench
    config = load_config("demo", row.overrides)
    learner, logits, labels = (
        create_method(config).learner,
        torch.tensor([[2.0, -1.0, 3.0]]),
        torch.tensor([[1.0, 0, 0]]),
    )
    assert learner.criterion == "balanced"
    assert learner.loss(logits, labels) == balanced_bce(logits, labels) != bce(logits, labels)
    with pytest.raises(FedncaError, match=r"'method.criterion' should be .*'balanced'.* not 'focal'"):
        parse_row("fedavg:criterion=focal")


def test_a_rows_folder_is_one_name_whatever_its_options_hold():
    rows = parse_rows(["fedlgt:text=a/b.npz", "fedlgt:text=a-b.npz", "fedlgt:text=../b .npz"])
    names = [row.folder for row in rows]
    assert len(set(names)) == 3
    assert all(name.startswith("fedlgt_text-") and not set(name) & set("/\\ :") for name in names)


def test_all_is_every_method_and_the_released_variant():
    texts = [row.text for row in parse_rows(["all", "fedprox:mu=0.1", "fedavg"])]
    assert texts == [*texts[: len(method_names()) + 1], "fedprox:mu=0.1"]
    assert {*method_names(), "fednca-ml:variant=released"} == set(texts[:-1])
    assert [row.text for row in parse_rows(["fedavg,fedprox"])] == ["fedavg", "fedprox"]


@pytest.mark.parametrize("text", ["", "0", "00", "-1", "1.5", "three", "1,,2", ",1", "1 2"])
def test_seeds_that_are_none(text):
    with pytest.raises(FedncaError, match="is neither a number of seeds"):
        parse_seeds(text)


def test_seeds():
    assert [parse_seeds(text) for text in ("1", "3", "0,", "7,4,7")] == [[0], [0, 1, 2], [0], [7, 4]]
