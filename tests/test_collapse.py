import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import tiny
from torch import nn

from fednca.base.errors import FedncaError
from fednca.engines.model import build_model
from fednca.engines.workplace import build_workplace
from fednca.measures.collapse import class_means, measure_collapse, positive_pairs
from fednca.methods import create_method, method_names
from fednca.models import ETFHead, simplex_etf
from fednca.runs import train


class Fixed(nn.Module):
    """A model whose features are its images, with a classifier of choice."""

    def __init__(self, W=None):
        super().__init__()
        self.head = nn.Identity() if W is None else ETFHead(W)

    def forward(self, images):
        return SimpleNamespace(features=images)


def one_hot(classes, number):
    return torch.nn.functional.one_hot(torch.tensor(classes), number).float()


def measure(features, labels, W=None):
    return measure_collapse(Fixed(W), [(features, labels)])


def naive(features, labels, W):
    """The definitions word by word: loops over classes and samples, d x d covariances, NumPy's pseudo-inverse."""
    features, labels, W = (each.numpy() for each in (features, labels, W))
    present = [c for c in range(labels.shape[1]) if (labels[:, c] == 1).any()]
    own = {c: [f[c] if f.ndim == 2 else f for f, y in zip(features, labels, strict=True) if y[c] == 1] for c in present}
    means = {c: sum(own[c]) / len(own[c]) for c in present}
    centre = sum(means.values()) / len(present)
    within = sum(sum(np.outer(f - means[c], f - means[c]) for f in own[c]) / len(own[c]) for c in present)
    between = sum(np.outer(means[c] - centre, means[c] - centre) for c in present)
    within, between, C = within / len(present), between / len(present), len(present)
    M = np.array([means[c] - centre for c in present])
    G, ideal = M @ M.T, np.array([[1.0 if a == b else -1 / (C - 1) for a in range(C)] for b in range(C)])
    W = W[present]
    return {
        "nc1": np.trace(within @ np.linalg.pinv(between, rcond=1e-10)) / C,
        "nc2": np.linalg.norm(G / np.linalg.norm(G) - ideal / np.linalg.norm(ideal)),
        "nc3": np.sum((M / np.linalg.norm(M) - W / np.linalg.norm(W)) ** 2),
    }


def test_a_perfect_simplex_has_collapsed():
    M = simplex_etf(7, 16, dtype=torch.float64)
    labels = one_hot([0, 1, 1, 1, 2, 3, 3, 4, 5, 6, 6], 7)
    features = labels.double() @ M
    assert measure(features, labels, M) == pytest.approx({"nc1": 0, "nc2": 0, "nc3": 0}, abs=1e-12)


def test_an_image_with_several_labels_collapses_only_with_a_feature_for_each():
    M = simplex_etf(5, 8, dtype=torch.float64)
    labels = torch.cat([one_hot([0, 1, 2, 3, 4], 5), one_hot([0, 1], 5).sum(dim=0, keepdim=True)])
    apart = M.expand(6, 5, 8)
    assert measure(apart, labels, M) == pytest.approx({"nc1": 0, "nc2": 0, "nc3": 0}, abs=1e-12)
    pooled = labels.double() @ M / labels.sum(dim=1, keepdim=True)
    assert min(measure(pooled, labels, M).values()) > 1e-3


@pytest.mark.parametrize("per_class", [False, True])
def test_the_measures_are_those_of_a_naive_loop(per_class):
    rng = torch.Generator().manual_seed(0)
    labels = (torch.rand(60, 6, generator=rng) < 0.3).float()
    labels[:, 4] = 0  # nobody has it
    labels[:5, 1] = -1  # unknown
    shape = (60, 6, 9) if per_class else (60, 9)
    features = torch.randn(shape, generator=rng, dtype=torch.float64) + 3
    W = torch.randn(6, 9, generator=rng, dtype=torch.float64)
    assert measure(features, labels, W) == pytest.approx(naive(features, labels, W), rel=1e-9)


def test_rotation_scale_and_shift_change_nothing():
    rng = torch.Generator().manual_seed(1)
    labels = (torch.rand(50, 5, generator=rng) < 0.4).float()
    features, W = (torch.randn(n, 8, generator=rng, dtype=torch.float64) for n in (50, 5))
    Q, _ = torch.linalg.qr(torch.randn(8, 8, generator=rng, dtype=torch.float64))
    moved = measure(3.7 * features @ Q + 2, labels, 0.2 * W @ Q)
    assert moved == pytest.approx(measure(features, labels, W), rel=1e-9)
    assert measure(features @ Q, labels, W)["nc3"] != pytest.approx(moved["nc3"], rel=1e-2)


def test_known_values():
    # two classes at +1 and -1, each spread by s: Σ_W = s², Σ_B = 1
    features = torch.tensor([[1.3], [0.7], [-0.7], [-1.3]], dtype=torch.float64)
    labels = one_hot([0, 0, 1, 1], 2)
    along = torch.tensor([[5.0], [-5.0]], dtype=torch.float64)
    assert measure(features, labels, along) == pytest.approx({"nc1": 0.09 / 2, "nc2": 0, "nc3": 0}, abs=1e-12)
    assert measure(features, labels, -along)["nc3"] == pytest.approx(4)  # opposite: ‖2u‖²
    # three means on a line: ‖vvᵀ/2 - (I - J/3)/√2‖² = 2 - √2
    line = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    assert measure(line, one_hot([0, 1, 2], 3))["nc2"] == pytest.approx(math.sqrt(2 - math.sqrt(2)))


def test_what_is_not_defined_is_none():
    nothing = {"nc1": None, "nc2": None, "nc3": None}
    assert measure(torch.randn(3, 4), torch.zeros(3, 2)) == nothing
    assert measure(torch.randn(3, 4), one_hot([0, 0, 0], 2)) == nothing  # one class has nothing to be apart from
    assert measure(torch.zeros(2, 4), one_hot([0, 1], 2)) == nothing  # dead features
    assert measure(torch.randn(2, 4), one_hot([0, 1], 2), torch.zeros(2, 4))["nc3"] is None


def test_no_images_are_told():
    with pytest.raises(FedncaError, match="there are none"):
        measure_collapse(Fixed(), [])


def test_pairs_tell_their_image_through_all_batches():
    labels = torch.tensor([[1.0, 0, 1], [0, -1, 0], [0, 1, 0]])
    features = torch.arange(6.0).reshape(3, 2)
    pairs = positive_pairs(Fixed(), [(features[:2], labels[:2]), (features[2:], labels[2:])])
    assert pairs.classes.tolist() == [0, 2, 1]
    assert pairs.images.tolist() == [0, 0, 2]
    assert pairs.features.tolist() == [[0, 1], [0, 1], [4, 5]]
    assert class_means(pairs, 3).tolist() == [[0, 1], [4, 5], [0, 1]]


@pytest.mark.parametrize("name", method_names())
def test_the_classifier_is_what_turns_features_into_logits(name):
    config = tiny(method__name=name)
    model = build_model(config, create_method(config), tuple("abcdefghij"), pretrained="none").double().eval()
    with torch.no_grad():
        output = model(torch.randn(6, 3, 16, 16, dtype=torch.float64))
    features, W = output.features, model.head.classifier_weights()
    dots = (features * W).sum(dim=-1) if features.ndim == 3 else features @ W.T
    change, wanted = dots.diff(dim=0), output.logits.diff(dim=0)  # without the bias
    torch.testing.assert_close(wanted, change * (wanted / change).mean())


def test_a_hidden_layer_leaves_no_classifier_to_compare_with():
    config = tiny(method__name="fedavg", method__options={"head": "mlp"})
    model = build_model(config, create_method(config), ("a", "b"), pretrained="none")
    assert model.head.classifier_weights() is None
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = measure_collapse(model.eval(), [(images, one_hot([0, 1], 2))])
    assert found["nc3"] is None
    assert found["nc2"] is not None


@pytest.mark.parametrize("name", ["fednca-ml", "spherefed"])
def test_a_run_keeps_the_measures_of_the_model_it_judges(name, tmp_path):
    config = tiny(method__name=name, train__rounds=2, evaluate__collapse=True)
    run = train(config, tmp_path / "with")
    place = build_workplace(config, run.method, run.federation, run.model("final"), torch.device("cpu"))
    with torch.no_grad():
        found = [(place.model(images).features.double(), labels) for images, labels in place.val.batches(1000)]
    ((features, labels),) = found
    best = run.results["val"]["round"]
    expected = naive(features, labels, place.model.head.classifier_weights().double())
    assert run.history[best - 1]["collapse"] == pytest.approx(expected, rel=1e-6)
    plain = train(config.replace({"evaluate.collapse": False}), tmp_path / "without")
    assert "collapse" not in plain.history[0]
    after, before = run.state("last").server.weights, plain.state("last").server.weights
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_other_engines_measure_the_same(tmp_path):
    config = tiny(train__rounds=1, evaluate__collapse=True)
    eager = train(config, tmp_path / "eager").history[0]["collapse"]
    spread = train(config.replace({"engine": "processes", "workers": 2}), tmp_path / "processes").history[0]["collapse"]
    assert spread == eager
