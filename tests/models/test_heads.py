import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fednca.base.errors import FedncaError
from fednca.models.cosine import SphereHead
from fednca.models.etf import orthonormal_rows, simplex_etf
from fednca.models.heads import Classifier, ETFHead, LADMHead, LinearHead, MLPHead
from fednca.models.ladm import LADM

B, C, D = 3, 4, 16


@pytest.fixture
def feature_map():
    return torch.randn(B, D, 2, 3, generator=torch.Generator().manual_seed(0))


def make_head(kind, **options):
    prototypes = simplex_etf(C, D)
    if kind is LADMHead:
        return LADMHead(LADM(D, prototypes), prototypes, **options)
    return ETFHead(prototypes, **options)


def test_linear_head_is_an_affine_map_of_the_mean(feature_map):
    head = LinearHead(D, C)
    output = head(feature_map)
    z = torch.stack([feature_map[i].reshape(D, -1).mean(dim=1) for i in range(B)])
    assert_close(output.features, z)
    assert_close(output.logits, z @ head.linear.weight.T + head.linear.bias)
    assert output.similarity is None


def test_mlp_head_is_the_released_stack(feature_map):
    head = MLPHead(D, C, hidden=32)
    assert [type(layer) for layer in head.layers] == [nn.Linear, nn.LayerNorm, nn.GELU, nn.Linear]
    assert [tuple(p.shape) for p in head.parameters()] == [(32, D), (32,), (32,), (32,), (C, 32), (C,)]
    output = head(feature_map)
    first, _, _, last = head.layers
    hidden = first(feature_map.mean(dim=(2, 3)))
    normal = (hidden - hidden.mean(dim=1, keepdim=True)) / (hidden.var(dim=1, keepdim=True, correction=0) + 1e-5).sqrt()
    gelu = normal * (1 + torch.erf(normal / 2**0.5)) / 2
    assert_close(output.logits, gelu @ last.weight.T + last.bias)


def test_etf_head_scores_by_dot_products(feature_map):
    output = make_head(ETFHead)(feature_map)
    M = simplex_etf(C, D)
    expected = [[(z * m).sum().item() for m in M] for z in feature_map.mean(dim=(2, 3))]
    assert_close(output.logits, torch.tensor(expected))
    assert output.similarity is None


def test_ladm_head_scores_each_class_by_its_own_feature(feature_map):
    head = make_head(LADMHead)
    output = head(feature_map)
    H, M = head.ladm(feature_map), simplex_etf(C, D)
    expected = [[[(H[i, c] * M[r]).sum().item() for r in range(C)] for c in range(C)] for i in range(B)]
    assert_close(output.similarity, torch.tensor(expected))
    assert_close(output.logits, torch.stack([output.similarity[:, c, c] for c in range(C)], dim=1))
    assert_close(output.features, H)


@pytest.mark.parametrize("kind", [ETFHead, LADMHead])
def test_affine_logits_start_at_ten_times_the_dots(feature_map, kind):
    torch.manual_seed(0)
    plain = make_head(kind)
    torch.manual_seed(0)
    affine = make_head(kind, affine=True)
    assert plain.scale is None
    assert plain.bias is None
    assert_close(affine(feature_map).logits, 10 * plain(feature_map).logits)
    with torch.no_grad():
        affine.scale.fill_(2)
        affine.bias.copy_(torch.arange(C))
    assert_close(affine(feature_map).logits, 2 * plain(feature_map).logits + torch.arange(C))
    if kind is LADMHead:
        assert_close(affine(feature_map).similarity, plain(feature_map).similarity)


@pytest.mark.parametrize("kind", [ETFHead, LADMHead])
def test_no_feature_is_far_from_all_prototypes_under_autocast_either(kind):
    left_over = simplex_etf(C, D).bfloat16().float().sum(dim=0)  # along which rounded prototypes agree
    feature = 100 * (left_over / left_over.norm()).bfloat16().float()
    head = make_head(kind)
    if kind is LADMHead:
        nn.init.zeros_(head.ladm.attention.out_proj.weight)
        head.ladm.attention.out_proj.bias.data.copy_(feature)
    with torch.autocast("cpu", torch.bfloat16):
        output = head(feature.view(1, D, 1, 1))
    assert feature @ left_over > 0.1
    assert_close(output.features, feature.expand_as(output.features), check_dtype=False)
    products = output.logits if output.similarity is None else output.similarity
    assert_close(products.sum(dim=-1), torch.zeros(products.shape[:-1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [ETFHead, LADMHead])
def test_prototypes_travel_only_when_trainable(kind):
    own = {name for name in make_head(kind).state_dict() if not name.startswith("ladm.")}
    assert own == set()
    trainable = make_head(kind, trainable=True, affine=True)
    assert {n for n, _ in trainable.named_parameters() if not n.startswith("ladm.")} == {"prototypes", "scale", "bias"}


def test_training_prototypes_does_not_touch_the_callers_tensor():
    prototypes = simplex_etf(C, D)
    head = ETFHead(prototypes, trainable=True)
    with torch.no_grad():
        head.prototypes.zero_()
    assert torch.equal(prototypes, simplex_etf(C, D))


def test_classifier_feeds_the_map_to_the_head():
    torch.manual_seed(0)
    model = Classifier(nn.Conv2d(3, D, 3), LinearHead(D, C))
    x = torch.randn(B, 3, 8, 8)
    assert_close(model(x).logits, model.head(model.backbone(x)).logits)
    assert {name.split(".")[0] for name in model.state_dict()} == {"backbone", "head"}


def test_the_released_baseline_has_1024_hidden_units():
    assert next(MLPHead(512, 10).parameters()).shape == (1024, 512)


def test_a_sphere_is_precise_whatever_autocast_says():
    torch.manual_seed(0)
    head, features = SphereHead(orthonormal_rows(5, 64, 0, "sphere"), 0.0), torch.randn(4, 64, 2, 2)
    exact = head(features)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(features)
    assert_close(found.logits, exact.logits, rtol=0, atol=1e-6)
    assert_close(found.features, exact.features, rtol=0, atol=1e-6)


def test_what_is_trained_of_an_etf_can_be_saved_as_it_lies():
    etf = simplex_etf(C, D)
    heads = ETFHead(etf, trainable=True), LADMHead(LADM(D, etf, learnable_queries=True), etf)
    assert all(tensor.is_contiguous() for head in heads for tensor in head.state_dict().values())
    assert heads[0].state_dict()["prototypes"].shape == (C, D)


@pytest.mark.parametrize(("classes", "width"), [(3, D), (C, 2 * D)])
def test_queries_and_prototypes_that_do_not_match_are_refused(classes, width):
    with pytest.raises(
        FedncaError, match=rf"queries of shape \({C}, {D}\), prototypes of shape \({classes}, {width}\)"
    ):
        LADMHead(LADM(D, simplex_etf(C, D)), simplex_etf(classes, width))
