"""What a site's numbers may be, one answer at a time; whole rounds with such answers are in test_faults."""

import math

import pytest
import torch
from flwr.app import MetricRecord, RecordDict

from fednca.base.errors import FedncaError
from fednca.engines.contract import Trained
from fednca.flower.checks import check_norm, read_histograms, read_update
from fednca.flower.records import to_arrays
from fednca.methods.contract import Server, Update

WEIGHTS = {"w": torch.zeros(2)}
EXPECTED = Trained(Update(0, WEIGHTS, {}, 1, 1), {}, {"bce": 0.0, "pull": 0.0})
COUNTS = {"samples": 5, "steps": 2}
LOSSES = {"bce": 0.5, "pull": 0.1}
SHAPE = (2, 1, 3)
MOST = 2**63 - 1


def answer(counts=COUNTS, losses=LOSSES):
    content = RecordDict({"weights": to_arrays(WEIGHTS), "extra": to_arrays({})})
    content["counts"], content["losses"] = MetricRecord(dict(counts)), MetricRecord(dict(losses))
    return content


def test_a_good_answer_is_taken_as_it_is():
    found = read_update(answer(), 3, EXPECTED)
    assert (found.update.client, found.update.samples, found.update.steps, found.losses) == (3, 5, 2, LOSSES)


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ({}, "its losses are none"),
        ({"bce": 0.5}, "its losses are bce"),
        (LOSSES | {"trojan": 0.1}, "its losses are bce, pull, trojan"),
        (LOSSES | {"pull": math.nan}, "its 'pull' is nan"),
        (LOSSES | {"pull": math.inf}, "its 'pull' is inf"),
        (LOSSES | {"pull": [0.1]}, r"its 'pull' is \[0.1\]"),
    ],
)
def test_losses_have_the_methods_names_and_are_finite_numbers(losses, sentence):
    with pytest.raises(FedncaError, match=sentence):
        read_update(answer(losses=losses), 0, EXPECTED)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({"samples": 5}, "its 'steps' is None"),
        (COUNTS | {"steps": 0}, "its 'steps' is 0"),
        (COUNTS | {"steps": 2.5}, "its 'steps' is 2.5"),
        (COUNTS | {"samples": [5]}, r"its 'samples' is \[5\]"),
    ],
)
def test_counts_are_whole_numbers_above_zero(counts, sentence):
    with pytest.raises(FedncaError, match=sentence):
        read_update(answer(counts=counts), 0, EXPECTED)


def histograms(val, test):
    """Return an answer with counts of one class, its negatives and positives in two bins."""
    parts = {"val": val, "test": test}
    record = to_arrays({part: torch.tensor(counts).view(SHAPE) for part, counts in parts.items()})
    return RecordDict({"histograms": record})


def test_histograms_may_count_all_images_or_fewer():
    found = read_histograms(histograms([0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2]), SHAPE, {"val": 5, "test": 3})
    assert {part: int(counts.sum()) for part, counts in found.items()} == {"val": 5, "test": 2}


@pytest.mark.parametrize(
    "counts",
    [
        [0, 0, 6, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [-1, 3, 0, 0, 0, 0],
        [MOST, MOST, 2, 0, 0, 0],  # whose sum is 2^64, and 0 in 64 bits
    ],
)
@pytest.mark.parametrize("part", ["val", "test"])
def test_histograms_that_count_other_images_than_the_sites_are_refused(part, counts):
    sent = dict.fromkeys(("val", "test"), [0] * 6) | {part: counts}
    with pytest.raises(FedncaError, match=f"its histograms for {part} do not count 5 images"):
        read_histograms(histograms(**sent), SHAPE, {"val": 9, "test": 9} | {part: 5})


def test_a_norm_may_reach_its_bound_and_extra_tensors_one_that_grows_with_small_steps():
    server = Server({"w": torch.zeros(2), "counter": torch.tensor(9)})

    def check(change, extra):
        weights = {"w": torch.tensor([3.0, 4.0]) * change, "counter": torch.tensor(0)}
        check_norm(Update(0, weights, {"c": torch.tensor([3.0, 4.0]) * extra}, 1, 1), server, 5.0, lr=0.125)

    check(1, 8)
    with pytest.raises(FedncaError, match=r"weights has norm 5\.05, where at most 5 is plausible"):
        check(1.01, 0)
    with pytest.raises(FedncaError, match=r"extra tensors have norm 40\.4, where at most 40 is plausible"):
        check(0, 8.08)
