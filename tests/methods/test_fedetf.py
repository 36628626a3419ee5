import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import small_model
from torch.testing import assert_close

from fednca.methods.fedetf import CosineLearner


def build(**options):
    learner = CosineLearner(**options)
    return learner, small_model(learner)


def test_logits_are_scaled_cosines_with_a_simplex():
    _, model = build(scale=7.0)
    feature_map = torch.randn(5, 64, 3, 2)
    M = model.head.prototypes.double().numpy()
    # a simplex ETF's Gram matrix: 1 on the diagonal, -1/(C-1) = -1/5 off it
    np.testing.assert_allclose(M @ M.T, np.eye(6) * 1.2 - 0.2, atol=1e-6)
    f = feature_map.double().numpy().mean(axis=(2, 3))
    cosines = [[z @ m / np.linalg.norm(z) for m in M] for z in f]
    output = model.head(feature_map)
    np.testing.assert_allclose(output.logits.detach().numpy(), 7 * np.array(cosines), atol=1e-5)
    assert_close(output.features.norm(dim=1), torch.ones(5))


def test_only_the_scale_of_the_head_is_trained_and_sent():
    learner, model = build()
    assert [name for name in model.state_dict() if name.startswith("head")] == ["head.scale"]
    assert model.head.scale.item() == 10
    images, labels = torch.randn(8, 3, 16, 16), (torch.rand(8, 6) < 0.4).float()
    logits = model.eval()(images).logits.detach()
    learner.losses(model, images, labels, None)["bce"].backward()
    # d BCE/ds = mean of (σ(a) - y)·cos, with cos = a/10
    assert_close(model.head.scale.grad, ((logits.sigmoid() - labels) * logits / 10).mean())


def test_the_loss_is_bce():
    learner, model = build()
    model.eval()
    images, labels = torch.randn(8, 3, 16, 16), (torch.rand(8, 6) < 0.4).float()
    expected = F.binary_cross_entropy_with_logits(model(images).logits, labels)
    assert_close(learner.losses(model, images, labels, None)["bce"], expected)


def test_the_etf_depends_on_its_own_seed_alone():
    first = build()[1].head.prototypes
    torch.manual_seed(1)
    assert torch.equal(CosineLearner().build_head(tuple("abcdef"), 64).prototypes, first)
    assert not torch.allclose(build(etf_seed=1)[1].head.prototypes, first, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cosines_are_precise_under_autocast(dtype):
    _, model = build(scale=1.0)
    feature_map = torch.randn(4, 64, 2, 2).to(dtype)
    exact = F.normalize(feature_map.mean(dim=(2, 3)).double(), dim=1) @ model.head.prototypes.double().T
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(feature_map).logits
    assert logits.dtype == torch.float32
    assert_close(logits.double(), exact, rtol=0, atol=1e-6)
