import math

import torch
import torch.nn.functional as F
from helpers import small_model
from torch.testing import assert_close

from fednca.methods.ml_decoder import DecoderLearner
from fednca.models import sincos_table

C, D, HEADS = 5, 16, 4


def build(**options):
    torch.manual_seed(0)
    return DecoderLearner(**options).build_head(tuple("abcde"), D).double()


def layer_norm(x, norm):
    mean, variance = x.mean(), ((x - x.mean()) ** 2).mean()
    return (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def naive_scores(head, feature_map, position):
    """One decoder layer, one sample, class and attention head at a time; the feature of class c decides logit c."""
    attention = head.attention.attention
    Wq, Wk, Wv = attention.in_proj_weight.chunk(3)
    bq, bk, bv = attention.in_proj_bias.chunk(3)
    size = D // HEADS
    scores = torch.empty(len(feature_map), C, dtype=torch.float64)
    for i, one in enumerate(feature_map):
        tokens = one.reshape(D, -1).T
        if position:
            tokens = tokens + sincos_table(*one.shape[1:], D)
        for c in range(C):
            q = head.attention.queries[c]
            parts = []
            for h in range(HEADS):
                own = slice(h * size, (h + 1) * size)
                key, value = tokens @ Wk[own].T + bk[own], tokens @ Wv[own].T + bv[own]
                weights = torch.exp(key @ (Wq[own] @ q + bq[own]) / math.sqrt(size))
                parts.append((weights / weights.sum()) @ value)
            attended = attention.out_proj.weight @ torch.cat(parts) + attention.out_proj.bias
            hidden = layer_norm(q + attended, head.norm1)
            first, _, second = head.ffn
            inner = (first.weight @ hidden + first.bias).clamp(min=0)
            feature = layer_norm(hidden + second.weight @ inner + second.bias, head.norm2)
            scores[i, c] = head.classifier.weight[c] @ feature + head.classifier.bias[c]
    return scores


def test_the_head_is_one_decoder_layer_without_self_attention():
    feature_map = torch.randn(3, D, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for position in (True, False):
        head = build(position=position)
        with torch.no_grad():
            for norm in (head.norm1, head.norm2):
                norm.weight.uniform_(0.5, 2)
                norm.bias.uniform_(-1, 1)
            output = head(feature_map)
            assert_close(output.logits, naive_scores(head, feature_map, position))
        assert output.features.shape == (3, C, D)
        assert output.similarity is None


def test_every_weight_of_the_head_is_trained_and_sent_and_the_loss_is_bce():
    learner = DecoderLearner()
    model = small_model(learner)
    assert model.state_dict()["head.attention.queries"].shape == (6, 64)
    assert model.state_dict()["head.ffn.0.weight"].shape == (128, 64)
    images, labels = torch.randn(8, 3, 16, 16), (torch.rand(8, 6) < 0.4).float()
    losses = learner.losses(model, images, labels, None)
    losses["bce"].backward()
    flat = [name for name, p in model.head.named_parameters() if p.grad is None or not p.grad.any()]
    assert flat == []
    model.eval()
    expected = F.binary_cross_entropy_with_logits(model(images).logits, labels)
    assert_close(learner.losses(model, images, labels, None)["bce"], expected)
