import numpy as np
import pytest
import torch
from torch import nn

from fednca.models import LADM, Classifier, LADMHead, LinearHead, MLPHead, simplex_etf
from fednca.models.evidence import attention_maps, evidence, grad_cam
from fednca.models.tokens import DecoderHead

DIM, CLASSES, SIZE = 8, 5, 12


@pytest.fixture
def images():
    return torch.rand(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def classifier(head):
    """Put a head behind a convolution that makes maps of 4 x 4."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, DIM, 3, stride=3), nn.Tanh())
    return Classifier(backbone, head).double().eval()


def ladm_head():
    prototypes = simplex_etf(CLASSES, DIM)
    return LADMHead(LADM(DIM, prototypes, heads=2), prototypes)


def test_grad_cam_of_a_linear_head_has_a_closed_form(images):
    model = classifier(LinearHead(DIM, CLASSES))
    found = grad_cam(model, images, [4, 1])
    feature_map, weight = model.backbone(images), model.head.linear.weight
    expected = torch.einsum("cd,bdhw->bchw", weight[[4, 1]], feature_map).relu() / 16
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
    assert (found > 0).any()


@pytest.mark.parametrize("head", [MLPHead(DIM, CLASSES, hidden=7), ladm_head(), DecoderHead(DIM, CLASSES, heads=2)])
def test_grad_cam_is_what_hooks_and_loops_give(images, head):
    model = classifier(head)
    seen = {}

    def keep(module, inputs, output):
        output.retain_grad()
        seen["map"] = output

    hook = model.backbone.register_forward_hook(keep)
    expected = np.zeros((3, 2, 4, 4))
    for k, c in enumerate((0, 3)):
        for b in range(3):
            model.zero_grad()
            model(images)[0][b, c].backward()
            activation, gradient = seen["map"][b].detach().numpy(), seen["map"].grad[b].numpy()
            cam = sum(gradient[d].mean() * activation[d] for d in range(DIM))
            expected[b, k] = np.maximum(cam, 0)
    hook.remove()
    np.testing.assert_allclose(grad_cam(model, images, [0, 3]).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head", [ladm_head(), DecoderHead(DIM, CLASSES, heads=2)])
def test_attention_is_the_softmax_of_queries_and_keys(images, head):
    model = classifier(head)
    ladm = next(part for part in head.modules() if isinstance(part, LADM))
    tokens = model.backbone(images).flatten(2).transpose(1, 2)
    tokens = (tokens + ladm._table(model.backbone(images))).detach().numpy()
    weight, bias = (each.detach().numpy() for each in (ladm.attention.in_proj_weight, ladm.attention.in_proj_bias))
    queries = ladm.queries.detach().numpy() @ weight[:DIM].T + bias[:DIM]
    found = attention_maps(model, images).numpy()
    assert found.shape == (3, 2, CLASSES, 4, 4)
    for b in range(3):
        keys = tokens[b] @ weight[DIM : 2 * DIM].T + bias[DIM : 2 * DIM]
        for h, part in enumerate((slice(0, 4), slice(4, 8))):
            scores = np.exp(queries[:, part] @ keys[:, part].T / 2)  # √4 channels a head
            expected = scores / scores.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(found[b, h].reshape(CLASSES, 16), expected, rtol=0, atol=1e-12)


def test_evidence_is_the_mean_attention_or_grad_cam_at_the_size_of_the_images(images):
    attentive, plain = classifier(ladm_head()), classifier(LinearHead(DIM, CLASSES))
    assert attention_maps(plain, images) is None
    small = {
        attentive: attention_maps(attentive, images).mean(dim=1)[:, [2, 0]],
        plain: grad_cam(plain, images, [2, 0]),
    }
    for model, maps in small.items():
        found = evidence(model, images, [2, 0])
        assert found.shape == (3, 2, SIZE, SIZE)
        # enlarged three times, bilinear, the middle pixel of each cell has the cell's own value
        middle = found[:, :, 1::3, 1::3]
        torch.testing.assert_close(middle / middle.amax((2, 3), True), maps / maps.amax((2, 3), True))
        torch.testing.assert_close(found.amax((2, 3)), torch.ones(3, 2, dtype=torch.float64))


def test_evidence_lies_where_the_class_is():
    backbone = nn.Conv2d(3, 2, 2, stride=2, bias=False)
    head = LinearHead(2, 2)
    with torch.no_grad():
        backbone.weight.zero_()
        backbone.weight[0, 0] = backbone.weight[1, 1] = 1  # channel 0 sees red, channel 1 green
        head.linear.weight.copy_(torch.eye(2))
    images = torch.zeros(1, 3, 8, 8)
    images[0, 0, :2, :2] = images[0, 1, 6:, 6:] = 1
    red, green = evidence(Classifier(backbone, head), images, [0, 1])[0]
    assert red[:2, :2].min() > 0.5
    assert red[4:, 4:].max() == 0
    assert green[6:, 6:].min() > 0.5
    assert green[:4, :4].max() == 0


def test_no_evidence_is_zero_everywhere(images):
    model = classifier(LinearHead(DIM, CLASSES))
    with torch.no_grad():
        model.head.linear.weight.zero_()
    assert evidence(model, images, [1]).eq(0).all()


def test_evidence_leaves_no_gradients_and_works_in_inference_mode(images):
    model = classifier(LinearHead(DIM, CLASSES))
    expected = evidence(model, images, [1])
    with torch.inference_mode():
        torch.testing.assert_close(evidence(model, images.clone(), [1]), expected)
    assert not expected.requires_grad
    assert all(weight.grad is None for weight in model.parameters())
