"""Class-balanced BCE and the asymmetric loss, and the two methods that are FedAvg on them."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import small_model
from torch.testing import assert_close

from fednca.base.errors import FedncaError
from fednca.config import validate
from fednca.measures.losses import asymmetric, balanced_bce
from fednca.methods.fedavg_asl import AsymmetricLearner
from fednca.methods.fedavg_balanced import BalancedLearner


def batch(unknown=0.0):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    y = (torch.rand(6, 5, generator=generator) < 0.3).double()
    return logits, y.masked_fill(torch.rand(6, 5, generator=generator) < unknown, -1)


def pairs(logits, y):
    """Yield probability and label of every known pair."""
    for a, label in zip(logits.flatten().tolist(), y.flatten().tolist(), strict=True):
        if label >= 0:
            yield 1 / (1 + math.exp(-a)), label


def naive_balanced(logits, y):
    positive = [-math.log(p) for p, label in pairs(logits, y) if label == 1]
    negative = [-math.log(1 - p) for p, label in pairs(logits, y) if label == 0]
    return sum(sum(terms) / max(len(terms), 1) for terms in (positive, negative)) / 2


def naive_asymmetric(logits, y, gamma_neg, gamma_pos, clip):
    terms = []
    for p, label in pairs(logits, y):
        q = max(p - clip, 0)
        terms.append(-((1 - p) ** gamma_pos) * math.log(p) if label else -(q**gamma_neg) * math.log(1 - q))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("unknown", [0.0, 0.4])
def test_balanced_bce_against_a_loop(unknown):
    logits, y = batch(unknown)
    assert balanced_bce(logits, y).item() == pytest.approx(naive_balanced(logits, y), rel=1e-12)


@pytest.mark.parametrize("unknown", [0.0, 0.4])
@pytest.mark.parametrize("powers", [(4.0, 0.0, 0.05), (2.0, 1.0, 0.0), (1.0, 3.0, 0.2)])
def test_asymmetric_loss_against_a_loop(unknown, powers):
    logits, y = batch(unknown)
    assert asymmetric(logits, y, *powers).item() == pytest.approx(naive_asymmetric(logits, y, *powers), rel=1e-12)


def test_asymmetric_loss_without_powers_and_clip_is_bce():
    logits, y = batch()
    assert_close(asymmetric(logits, y, 0.0, 0.0, 0.0), F.binary_cross_entropy_with_logits(logits, y))


def test_balanced_bce_is_bce_where_positives_are_as_many_as_negatives():
    logits, _ = batch()
    y = (torch.arange(30) % 2).view(6, 5).double()
    assert_close(balanced_bce(logits, y), F.binary_cross_entropy_with_logits(logits, y))


@pytest.mark.parametrize("loss", [balanced_bce, asymmetric])
@pytest.mark.parametrize("labels", ["mixed", "no positives", "no negatives", "none known"])
def test_extreme_logits_and_one_sided_batches_stay_finite(loss, labels):
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-1e4, 1e4, 1e-30, -1e4]], requires_grad=True)
    y = {
        "mixed": torch.tensor([[1.0, 0, 1, 0], [1, 0, 0, -1]]),
        "no positives": torch.zeros(2, 4),
        "no negatives": torch.ones(2, 4),
        "none known": -torch.ones(2, 4),
    }[labels]
    value = loss(logits, y)
    value.backward()
    assert value.isfinite()
    assert logits.grad.isfinite().all()
    assert (labels == "none known") == (value.item() == 0)


@pytest.mark.parametrize("loss", [balanced_bce, asymmetric])
def test_unknown_labels_have_no_gradient_and_known_ones_have(loss):
    logits, y = batch(unknown=0.4)
    logits.requires_grad_()
    loss(logits, y).backward()
    assert logits.grad[y < 0].count_nonzero() == 0
    assert (logits.grad[y == 1] < 0).all()


@pytest.mark.parametrize(
    ("learner", "reference"),
    [
        (BalancedLearner(), naive_balanced),
        (AsymmetricLearner(), lambda logits, y: naive_asymmetric(logits, y, 4.0, 0.0, 0.05)),
        (
            AsymmetricLearner(gamma_neg=2.0, gamma_pos=1.0, clip=0.1),
            lambda logits, y: naive_asymmetric(logits, y, 2.0, 1.0, 0.1),
        ),
    ],
)
def test_the_methods_train_on_their_loss(learner, reference):
    model = small_model(learner, "abcde").double().eval()
    images, (_, y) = torch.randn(6, 3, 16, 16, dtype=torch.float64), batch()
    (loss,) = learner.losses(model, images, y, None).values()
    assert loss.item() == pytest.approx(reference(model(images).logits.detach(), y), rel=1e-9)


@pytest.mark.parametrize("name", ["gamma_neg", "gamma_pos"])
def test_a_power_below_one_is_refused_in_one_sentence(name):
    with pytest.raises(FedncaError, match=rf"{name}': a power of 0.5 has no finite slope at 0; use 0 or at least 1$"):
        validate(AsymmetricLearner, {name: 0.5})
    assert getattr(validate(AsymmetricLearner, {name: 1.0}), name) == 1.0
