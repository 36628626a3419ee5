"""SphereFed against NumPy: cosines, targets, and the calibration as ridge regression."""

import math

import numpy as np
import pytest
import torch
from helpers import pooled_features, small_model, tiny
from torch.testing import assert_close

from fednca.base.errors import FedncaError
from fednca.engines.local_update import add_up
from fednca.methods import create_method
from fednca.methods.contract import Server
from fednca.methods.spherefed import ClosedForm, SphereLearner
from fednca.models.etf import orthonormal_rows
from fednca.runs import train

C, D = 5, 64
CLASSES = "abcde"


def build(**options):
    learner = SphereLearner(**options)
    return learner, small_model(learner, CLASSES).double().eval()


def close(closing, server, *sums):
    exchanges = closing.close(server)
    assert next(exchanges) == {}
    with pytest.raises(StopIteration) as end:  # the first exchange is the last
        exchanges.send({name: sum(each[name] for each in sums) for name in sums[0]})
    return end.value.value


def cosines(feature_map, W):
    f = feature_map.double().numpy().mean(axis=(2, 3))
    return np.array([[z @ w / np.linalg.norm(z) for w in W] for z in f])


@pytest.mark.parametrize("target", ["scaled", "shifted"])
def test_scores_are_cosines_with_an_orthonormal_classifier(target):
    learner, model = build(target=target)
    feature_map = torch.randn(4, D, 2, 3, dtype=torch.float64)
    W = orthonormal_rows(C, D, 0, "sphere").double().numpy()
    np.testing.assert_allclose(W @ W.T, np.eye(C), atol=1e-6)
    expected = cosines(feature_map, W)
    expected = (expected + 1) / 2 if target == "shifted" else expected
    output = model.head(feature_map)
    np.testing.assert_allclose(output.logits, expected, atol=1e-7)
    np.testing.assert_allclose(learner.probabilities(output.logits), expected.clip(0, 1), atol=1e-7)
    assert_close(output.features.norm(dim=1), torch.ones(4, dtype=torch.float64))
    assert list(model.head.parameters()) == []


def test_the_classifier_depends_on_its_own_seed_alone():
    first = build()[1].head.weight
    torch.manual_seed(1)
    assert torch.equal(SphereLearner().build_head(tuple(CLASSES), D).weight.double(), first)
    assert not torch.allclose(build(classifier_seed=1)[1].head.weight, first, atol=0.1)


@pytest.mark.parametrize("target", ["scaled", "shifted"])
def test_the_loss_against_a_loop(target):
    learner, model = build(target=target)
    images = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    labels = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, -1, 1, 0, -1], [-1] * 5, [0, 1, 0, 0, 0]]).double()
    scores = cosines(model.backbone(images).detach(), orthonormal_rows(C, D, 0, "sphere").double().numpy())
    errors = []
    for row, y in zip(scores, labels.tolist(), strict=True):
        for cosine, label in zip(row, y, strict=True):
            if label >= 0 and target == "scaled":
                errors.append((cosine - label / math.sqrt(max(y.count(1.0), 1))) ** 2)
            elif label >= 0:
                errors.append(((cosine + 1) / 2 - label) ** 2)
    assert len(errors) == 18
    loss = learner.losses(model, images, labels, None)["mse"]
    assert loss.item() == pytest.approx(sum(errors) / 18, rel=1e-6)


def test_nothing_known_is_no_loss():
    learner, model = build()
    images, labels = torch.randn(2, 3, 16, 16).double(), -torch.ones(2, C).double()
    assert learner.losses(model, images, labels, None)["mse"].item() == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny(method__name="spherefed", train__rounds=4, train__participation=0.7)
    return train(config, tmp_path_factory.mktemp("sphere") / "run")


def test_training_and_averaging_leave_the_classifier_as_it_was(run):
    weights = run.state("last").server.weights
    assert torch.equal(weights["head.weight"], orthonormal_rows(10, D, 0, "sphere"))
    assert float(weights["head.offset"]) == 0


def test_calibration_is_ridge_regression_of_the_labels_on_all_features(run, tmp_path):
    Z, Y = pooled_features(run)
    augmented = np.concatenate([Z, math.sqrt(1e-3) * np.eye(D)]), np.concatenate([Y, np.zeros((D, 10))])
    expected = np.linalg.lstsq(*augmented, rcond=None)[0].T
    found, until_best = run.state("final").server.weights, {"train.rounds": run.results["val"]["round"]}
    trained = train(run.config.replace(until_best), tmp_path / "best").state("last").server.weights
    np.testing.assert_allclose(found["head.weight"], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())

    before = np.square(Z @ trained["head.weight"].numpy().T - Y).mean()
    after = np.square(Z @ found["head.weight"].numpy().T - Y).mean()
    assert after < before
    assert run.results["last"]["test"] == run.history[-1]["test"]  # every round is judged as it would be used
    others = [name for name in found if not name.startswith("head.")]
    assert others
    assert all(torch.equal(found[name], trained[name]) for name in others)
    assert_close(run.state("best").server.weights, found, rtol=0, atol=0)


def test_clients_send_their_share_of_the_pooled_sums_and_no_more():
    _, model = build()
    closing = ClosedForm()
    images, labels = torch.randn(12, 3, 16, 16).double(), torch.randint(-1, 2, (12, C)).double()
    with torch.no_grad():
        sums = [
            add_up(closing.sums(model, *b, {}) for b in zip(images[part].split(3), labels[part].split(3), strict=True))
            for part in (slice(0, 7), slice(7, 12))
        ]
        Z = model(images).features.numpy()
    Y = (labels == 1).double().numpy()  # an unknown label counts as absent
    assert sum(tensor.numel() for tensor in sums[0].values()) == D * D + D * C
    assert all(tensor.dtype == torch.float64 for tensor in sums[0].values())
    np.testing.assert_allclose(sums[0]["V"] + sums[1]["V"], sum(np.outer(z, z) for z in Z), atol=1e-12)
    np.testing.assert_allclose(
        sums[0]["U"] + sums[1]["U"], sum(np.outer(z, y) for z, y in zip(Z, Y, strict=True)), atol=1e-12
    )


@pytest.mark.parametrize("target", ["scaled", "shifted"])
def test_features_that_are_all_alike_still_have_a_calibration(target):
    _, model = build(target=target)
    closing = ClosedForm(ridge=0.5)
    image = torch.randn(1, 3, 16, 16).double()
    images, labels = image.repeat(8, 1, 1, 1), torch.tensor([[1.0, 0, 1, 0, 0]] * 6 + [[0.0, 1, 1, 0, 0]] * 2).double()
    with torch.no_grad():
        server = close(closing, Server(dict(model.state_dict())), closing.sums(model, images, labels, {}))
        model.load_state_dict(server.weights)
        # V = n·zzᵀ has rank 1, and (n·zzᵀ + εI)⁻¹z = z/(n + ε), so that the score is Σy/(n + ε) = Σy/8.5
        assert_close(model(image).logits[0], torch.tensor([6, 2, 8, 0, 0]).double() / 8.5)


def test_fewer_images_than_channels_and_a_tiny_ridge_have_a_calibration():
    _, model = build()
    closing = ClosedForm(ridge=1e-6)
    images, labels = torch.randn(6, 3, 16, 16).double(), (torch.rand(6, C) < 0.5).double()
    with torch.no_grad():
        Z = model(images).features.numpy()
        server = close(closing, Server(dict(model.state_dict())), closing.sums(model, images, labels, {}))
    # the dual form of ridge regression solves 6 equations in place of 64: Zᵀ(ZZᵀ + εI)⁻¹Y
    expected = Z.T @ np.linalg.solve(Z @ Z.T + 1e-6 * np.eye(6), labels.numpy())
    np.testing.assert_allclose(server.weights["head.weight"].T, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_a_foreign_learner_or_criterion_is_refused():
    with pytest.raises(FedncaError, match=r"^the closing of 'spherefed' .* 'fedavg'.*--closing none"):
        create_method(tiny(method__name="spherefed", method__learner="fedavg"))
    with pytest.raises(FedncaError, match=r"leave method\.criterion out"):
        create_method(tiny(method__name="spherefed", method__criterion="balanced"))


def test_more_classes_than_channels_are_refused():
    with pytest.raises(FedncaError, match="5 orthonormal vectors do not fit in 4 dimensions"):
        SphereLearner().build_head(tuple(CLASSES), 4)
