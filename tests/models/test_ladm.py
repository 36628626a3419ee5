import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fednca.base.errors import FedncaError
from fednca.models.etf import simplex_etf
from fednca.models.ladm import LADM, sincos_table


@pytest.fixture
def feature_map():
    return torch.randn(2, 16, 3, 5, generator=torch.Generator().manual_seed(0))


def make_ladm(**options):
    torch.manual_seed(1)
    return LADM(16, simplex_etf(4, 16), **options)


def with_identity_projections(ladm):
    eye = torch.eye(16)
    with torch.no_grad():
        ladm.attention.in_proj_weight.copy_(torch.cat([eye, eye, eye]))
        ladm.attention.out_proj.weight.copy_(eye)
    return ladm


def naive_sincos_table(height, width, dim):
    half = dim // 2
    table = torch.zeros(height * width, dim, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            for channel in range(dim):
                coordinate, k = (y, channel) if channel < half else (x, channel - half)
                angle = coordinate / 10000 ** (2 * (k // 2) / half)
                table[y * width + x, channel] = math.cos(angle) if k % 2 else math.sin(angle)
    return table


@pytest.mark.parametrize(("height", "width", "dim"), [(1, 1, 4), (4, 4, 8), (3, 5, 12), (7, 2, 64), (2, 2, 196)])
def test_position_table_is_the_naive_loop(height, width, dim):
    assert_close(sincos_table(height, width, dim), naive_sincos_table(height, width, dim))


def test_position_table_needs_a_multiple_of_four():
    with pytest.raises(FedncaError, match=r"6 channels.*multiple of 4"):
        sincos_table(2, 2, 6)


def test_heads_must_divide_the_channels():
    with pytest.raises(FedncaError, match=r"3 attention heads.*16 channels"):
        make_ladm(heads=3)


@pytest.mark.parametrize("position", [True, False])
def test_one_identity_head_is_a_softmax_average(feature_map, position):
    ladm = with_identity_projections(make_ladm(heads=1, position=position))
    tokens = feature_map.flatten(2).transpose(1, 2)
    if position:
        tokens = tokens + naive_sincos_table(3, 5, 16).float()
    weights = torch.softmax(torch.einsum("cd,bsd->bcs", ladm.queries, tokens) / 16**0.5, dim=-1)
    features, attention = ladm.forward_with_attention(feature_map)
    assert_close(features, torch.einsum("bcs,bsd->bcd", weights, tokens))
    assert_close(attention, weights.reshape(2, 1, 4, 3, 5))


def test_asking_for_attention_does_not_change_the_features(feature_map):
    ladm = make_ladm()
    features, attention = ladm.forward_with_attention(feature_map)
    assert_close(features, ladm(feature_map))
    assert attention.shape == (2, 4, 4, 3, 5)
    assert_close(attention.sum(dim=(-2, -1)), torch.ones(2, 4, 4))


def test_only_the_position_tells_tokens_apart(feature_map):
    order = torch.randperm(15, generator=torch.Generator().manual_seed(2))
    shuffled = feature_map.flatten(2)[..., order].reshape(feature_map.shape)
    blind, sighted = make_ladm(position=False), make_ladm(position=True)
    assert_close(blind(shuffled), blind(feature_map))
    assert not torch.allclose(sighted(shuffled), sighted(feature_map), atol=1e-3)


def test_moving_position_with_the_tokens_changes_nothing(feature_map):
    order = torch.randperm(15, generator=torch.Generator().manual_seed(2))
    tokens = feature_map.flatten(2) + sincos_table(3, 5, 16).float().T
    moved = tokens[..., order].reshape(feature_map.shape)
    assert_close(make_ladm(position=False)(moved), make_ladm(position=True)(feature_map))


def test_fixed_queries_do_not_travel_and_learnable_ones_do():
    fixed, learnable = make_ladm(), make_ladm(learnable_queries=True)
    attention = {f"attention.{name}" for name in nn.MultiheadAttention(16, 4).state_dict()}
    assert set(fixed.state_dict()) == attention
    assert set(learnable.state_dict()) == attention | {"queries"}
    assert "queries" not in dict(fixed.named_parameters())
    assert "queries" in dict(learnable.named_parameters())


def test_table_follows_the_size_and_is_built_once(feature_map, monkeypatch):
    built = []
    monkeypatch.setattr("fednca.models.ladm.sincos_table", lambda *size: built.append(size) or sincos_table(*size))
    ladm = make_ladm()
    for x in (feature_map, feature_map, feature_map.transpose(2, 3), feature_map):
        ladm(x)
    assert built == [(3, 5, 16), (5, 3, 16)]
    assert_close(ladm(feature_map), make_ladm()(feature_map))


def test_table_survives_copies_casts_and_functional_calls(feature_map):
    ladm = make_ladm()
    with torch.inference_mode():
        expected = ladm(feature_map)
    assert_close(copy.deepcopy(ladm)(feature_map), expected)
    assert_close(torch.func.functional_call(ladm, dict(ladm.named_parameters()), (feature_map,)), expected)
    assert_close(ladm.double()(feature_map.double()), expected.double(), atol=1e-5, rtol=1e-5)


def test_training_after_evaluation_reaches_every_parameter_and_the_map(feature_map):
    ladm = make_ladm(learnable_queries=True)
    with torch.inference_mode():
        ladm(feature_map)
    feature_map.requires_grad_()
    ladm(feature_map).square().sum().backward()
    assert feature_map.grad.abs().sum() > 0
    assert all(p.grad.abs().sum() > 0 for p in ladm.parameters())


def test_runs_under_bf16_autocast_near_the_float32_result(feature_map):
    ladm = make_ladm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, low_from_bf16 = ladm(feature_map), ladm(feature_map.bfloat16())
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), ladm(feature_map), atol=0.05, rtol=0.05)
    assert_close(low_from_bf16.float(), ladm(feature_map), atol=0.05, rtol=0.05)
