import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from fednca.errors import FedncaError
from fednca.losses import (
    asymmetric,
    balanced_bce,
    bce,
    bce_sum,
    negative_rejection,
    negative_rejection_released,
    objective,
    objective_released,
    positive_contrast,
    positive_contrast_released,
)
from fednca.models.etf import simplex_etf
from fednca.models.heads import Output

D = 8


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_softmax(row, c):
    return row[c] - math.log(sum(math.exp(a) for a in row))


def naive_bce(logits, y, reduction):
    terms = [
        [
            -math.log(sigmoid(a)) if label else -math.log(1 - sigmoid(a))
            for a, label in zip(row, labels, strict=True)
            if label >= 0
        ]
        for row, labels in zip(logits, y, strict=True)
    ]
    known = sum(len(row) for row in terms)
    return sum(map(sum, terms)) / (max(known, 1) if reduction == "mean" else len(y))


def naive_negative(A, y, tau):
    total = 0.0
    for rows, labels in zip(A, y, strict=True):
        negatives = [c for c, label in enumerate(labels) if label == 0]
        for c in negatives:
            foreign = [sigmoid(a) for r, a in enumerate(rows[c]) if r != c]
            total += sum(-math.log(1 - s) for s in foreign if s > tau) / len(foreign) / len(negatives)
    return total / len(y)


def naive_positive(A, y):
    total = 0.0
    for rows, labels in zip(A, y, strict=True):
        positives = [c for c, label in enumerate(labels) if label == 1]
        total += sum(-log_softmax(rows[c], c) / len(positives) for c in positives)
    return total / len(y)


def naive_negative_released(A, y, scale, bias, tau):
    losses, n = [], 0
    for rows, labels in zip(A, y, strict=True):
        for row, label in zip(rows, labels, strict=True):
            n += label == 1
            if label == 0:
                losses.append(max(sigmoid(max(scale * a + b for a, b in zip(row, bias, strict=True))) - tau, 0))
    return sum(sorted(losses, reverse=True)[:n]) / len(y)


def naive_positive_released(features, y, prototypes, temperature):
    total = 0.0
    for rows, labels in zip(features, y, strict=True):
        for c, label in enumerate(labels):
            if label == 1:
                cosines = [
                    sum(a * b for a, b in zip(rows[c], m, strict=True)) / math.hypot(*rows[c]) / math.hypot(*m)
                    for m in prototypes
                ]
                total -= log_softmax([cosine / temperature for cosine in cosines], c)
    return total / len(y)


@st.composite
def batches(draw):
    """Draw labels of any mix of negatives, positives and unknowns, with features and prototypes to match."""
    B, C = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    allowed = draw(st.sampled_from([(0, 1), (0,), (1,), (-1,), (-1, 0, 1)]))
    y = draw(st.lists(st.lists(st.sampled_from(allowed), min_size=C, max_size=C), min_size=B, max_size=B))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    features = 3 * torch.randn(B, C, D, generator=generator, dtype=torch.float64)
    prototypes = torch.randn(C, D, generator=generator, dtype=torch.float64)
    return features, prototypes, torch.tensor(y)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_every_loss_is_the_naive_loop(batch):
    features, prototypes, y = batch
    A = features @ prototypes.T / 2
    logits = A.diagonal(dim1=1, dim2=2)
    scale, bias = torch.tensor(0.3, dtype=torch.float64), torch.linspace(-1, 1, y.shape[1], dtype=torch.float64)
    rows, labels = A.tolist(), y.tolist()
    pairs = [
        (bce(logits, y), naive_bce(logits.tolist(), labels, "mean")),
        (bce_sum(logits, y), naive_bce(logits.tolist(), labels, "sum")),
        (negative_rejection(A, y), naive_negative(rows, labels, 0.3)),
        (negative_rejection(A, y, tau=0.7), naive_negative(rows, labels, 0.7)),
        (positive_contrast(A, y), naive_positive(rows, labels)),
        (
            negative_rejection_released(A, y, scale, bias),
            naive_negative_released(rows, labels, 0.3, bias.tolist(), 0.3),
        ),
        (
            positive_contrast_released(features, y, prototypes),
            naive_positive_released(features.tolist(), labels, prototypes.tolist(), 0.07),
        ),
    ]
    for ours, naive in pairs:
        assert ours.dtype == torch.float64
        assert ours.item() == pytest.approx(naive, rel=1e-8, abs=1e-12)
    assert_close(negative_rejection(A, y.float()), negative_rejection(A, y))


def example(dtype=torch.float64, size=1.0):
    generator = torch.Generator().manual_seed(3)
    features = size * torch.randn(4, 5, D, generator=generator, dtype=torch.float64)
    y = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [-1, 1, 0, -1, 0]])
    return features.to(dtype), simplex_etf(5, D, dtype=dtype), y


def all_terms(features, prototypes, y, scale, bias):
    A = features @ prototypes.T
    output = Output(scale * A.diagonal(dim1=1, dim2=2) + bias, A, features)
    paper = objective(output, y, lambda1=1, lambda2=1)
    released = objective_released(output, y, prototypes, scale, bias, lambda1=1, lambda2=1)
    return [*paper.values(), *released.values()]


def test_gradients_are_those_of_finite_differences():
    features, prototypes, y = example()
    scale, bias = torch.tensor(2.0).double(), torch.linspace(-0.5, 0.5, 5).double()
    threshold = math.log(0.3 / 0.7)
    assert ((features @ prototypes.T) - threshold).abs().min() > 1e-3, "the indicator has a jump at the threshold"
    inputs = [tensor.requires_grad_() for tensor in (features, prototypes, scale, bias)]
    assert torch.autograd.gradcheck(lambda f, m, s, b: tuple(all_terms(f, m, y, s, b)), inputs)


def test_the_indicator_filters_and_has_no_gradient():
    A = torch.tensor([[[9.0, -2.0], [-0.5, 9.0]]], requires_grad=True)
    y = torch.tensor([[0, 0]])
    loss = negative_rejection(A, y)
    loss.backward()
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.5)) / 2)
    assert_close(A.grad, torch.tensor([[[0.0, 0.0], [sigmoid(-0.5) / 2, 0.0]]]))


def test_one_class_has_no_foreign_prototype_to_be_rejected_by():
    A = torch.tensor([[[5.0]], [[-5.0]]], requires_grad=True)
    loss = negative_rejection(A, torch.tensor([[0], [0]]))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not A.grad.any()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("autocast", [True, False])
def test_finite_for_extreme_logits(sign, autocast):
    features, prototypes, y = example(torch.float32, size=sign * 1e4)
    scale, bias = torch.tensor(10.0), torch.zeros(5)
    inputs = [tensor.requires_grad_() for tensor in (features, prototypes, scale, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        terms = all_terms(features, prototypes, y, scale, bias)
        sum(terms).backward()
    assert all(term.isfinite() and term.dtype == torch.float32 for term in terms)
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


def test_autocast_costs_no_precision_inside_the_losses():
    features, prototypes, y = example(torch.bfloat16)
    prototypes = prototypes.float()
    A = features.float() @ prototypes.T
    scale, bias = torch.tensor(2.0), torch.zeros(5)
    exact = [
        negative_rejection_released(A.double(), y, scale.double(), bias.double()),
        positive_contrast_released(features.double(), y, prototypes.double()),
        negative_rejection(A.double(), y),
        positive_contrast(A.double(), y),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = [
            negative_rejection_released(A, y, scale, bias),
            positive_contrast_released(features, y, prototypes),
            negative_rejection(A, y),
            positive_contrast(A, y),
        ]
    for ours, expected in zip(low, exact, strict=True):
        assert_close(ours, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("label", [0, 1, -1])
def test_a_batch_without_positives_or_negatives_gives_zero_with_zero_gradient(label):
    features, prototypes, _ = example(torch.float32)
    features.requires_grad_()
    y = torch.full((4, 5), label)
    A = features @ prototypes.T
    absent = []
    if label != 0:
        absent += [negative_rejection(A, y), negative_rejection_released(A, y, torch.tensor(1.0), torch.zeros(5))]
    if label != 1:
        absent += [positive_contrast(A, y), positive_contrast_released(features, y, prototypes)]
    if label == -1:
        absent += [bce(A.diagonal(dim1=1, dim2=2), y)]
    sum(absent).backward()
    assert [term.item() for term in absent] == [0.0] * len(absent)
    assert torch.equal(features.grad, torch.zeros_like(features))


def test_samples_without_positives_still_count():
    A = torch.zeros(2, 3, 3)
    y = torch.tensor([[1, 0, 0], [0, 0, 0]])
    assert positive_contrast(A, y).item() == pytest.approx(math.log(3) / 2)


def test_objective_weighs_its_terms_and_leaves_out_those_of_weight_zero():
    features, prototypes, y = example()
    A = features @ prototypes.T
    output = Output(A.diagonal(dim1=1, dim2=2), A, features)
    terms = objective(output, y, lambda1=0.01, lambda2=0)
    assert set(terms) == {"bce", "neg"}
    assert terms["neg"].item() == pytest.approx(0.01 * naive_negative(A.tolist(), y.tolist(), 0.3))
    scale, bias = torch.tensor(2.0), torch.zeros(5)
    released = objective_released(output, y, prototypes, scale, bias, lambda1=0, lambda2=3)
    assert set(released) == {"bce", "pos"}
    naive = naive_positive_released(features.tolist(), y.tolist(), prototypes.tolist(), 0.07)
    assert released["pos"].item() == pytest.approx(3 * naive)
    assert released["bce"].item() == pytest.approx(naive_bce(output.logits.tolist(), y.tolist(), "sum"))


def test_a_head_without_class_features_has_only_bce():
    output = Output(torch.zeros(2, 3), None, torch.zeros(2, D))
    y = torch.zeros(2, 3)
    assert objective(output, y, lambda1=0, lambda2=0)["bce"].item() == pytest.approx(math.log(2))
    with pytest.raises(FedncaError, match="lambda1 and lambda2 to 0"):
        objective(output, y, lambda1=1, lambda2=0)


def test_nothing_depends_on_the_values_of_the_data():
    features, prototypes, y = example()
    scale, bias = torch.tensor(10.0).double(), torch.zeros(5).double()

    def terms(features, y):
        return torch.stack(all_terms(features, prototypes, y, scale, bias))

    clients = (torch.stack([features, -features]), torch.stack([y, 1 - y.abs()]))
    # vmap refuses every branch, index or shape that needs a value, as a CUDA graph would silently freeze it
    together = torch.vmap(terms)(*clients)
    assert_close(together, torch.stack([terms(*client) for client in zip(*clients, strict=True)]))


def test_prototypes_follow_the_precision_of_features():
    features, prototypes, y = example(torch.float32)
    expected = positive_contrast_released(features.double(), y, prototypes.double())
    assert_close(positive_contrast_released(features.double(), y, prototypes), expected)


def test_the_easiest_negatives_do_not_count_without_a_power_either():
    logits, y = torch.tensor([[-6.0, 1.0]], dtype=torch.float64), torch.zeros(1, 2)  # of the first, p is below the clip
    shifted = torch.sigmoid(logits[0, 1]) - 0.05
    assert_close(asymmetric(logits, y, 0.0, 0.0, 0.05), -(1 - shifted).log() / 2)


@pytest.mark.parametrize(("released", "tau"), [(False, 0.6), (True, 0.5)])
def test_tau_reaches_the_negative_term(released, tau):
    A = torch.tensor([[[0.0, 0.2], [0.2, 0.0]]], dtype=torch.float64)  # σ(0.2) is 0.55
    output, y = Output(A.diagonal(dim1=1, dim2=2), A, A), torch.tensor([[0, 1]])
    weights = {"lambda1": 1.0, "lambda2": 0.0, "tau": tau}
    if released:
        affine = (torch.eye(2).double(), torch.tensor(1.0).double(), torch.zeros(2).double())
        assert objective_released(output, y, *affine, **weights)["neg"].item() == pytest.approx(sigmoid(0.2) - tau)
    else:
        assert objective(output, y, **weights)["neg"].item() == 0.0


@pytest.mark.parametrize("cut", [(slice(None), slice(1)), (slice(1), slice(None)), (0,)])
def test_labels_of_another_shape_are_refused_and_not_broadcast(cut):
    A = torch.randn(4, 3, 3)
    y = torch.ones(4, 3)[cut]
    calls = {
        "balanced": lambda: balanced_bce(A[:, 0], y),
        "asymmetric": lambda: asymmetric(A[:, 0], y),
        "negative": lambda: negative_rejection(A, y),
        "positive": lambda: positive_contrast(A, y),
        "negative, released": lambda: negative_rejection_released(A, y, torch.tensor(1.0), torch.zeros(3)),
        "positive, released": lambda: positive_contrast_released(A, y, torch.eye(3)),
    }
    for call in calls.values():
        with pytest.raises(FedncaError, match=r"labels of shape .* do not fit scores of shape \(4, 3\)"):
            call()


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_without_known_labels_has_loss_zero_and_an_empty_one_too(known):
    samples = 0 if known else 2
    y = torch.full((samples, 3), -1.0)
    logits, A = torch.randn(samples, 3, requires_grad=True), torch.randn(samples, 3, 3, requires_grad=True)
    features = torch.randn(samples, 3, D, requires_grad=True)
    losses = [criterion(logits, y) for criterion in (bce, bce_sum, balanced_bce, asymmetric)]
    losses += [negative_rejection(A, y), positive_contrast(A, y)]
    losses.append(negative_rejection_released(A, y, torch.tensor(1.0), torch.zeros(3)))
    losses.append(positive_contrast_released(features, y, simplex_etf(3, D)))
    for loss in losses:
        loss.backward()
        assert loss.item() == 0
    assert not any(own.grad.any() for own in (logits, A, features))


@pytest.mark.parametrize("tau", [0, 1, -0.5, math.nan])
def test_a_tau_that_is_no_probability_is_refused(tau):
    with pytest.raises(FedncaError, match=f"tau is {tau}, .* between 0 and 1"):
        negative_rejection(torch.zeros(1, 3, 3), torch.zeros(1, 3), tau)
