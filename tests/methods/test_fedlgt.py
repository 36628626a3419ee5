"""FedLGT: what is revealed, what is asked, and what the global model hides again."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import local_of, small_model
from scipy.stats import chisquare
from torch.testing import assert_close

from fednca.base.errors import FedncaError
from fednca.methods.fedlgt import LabelTransformerLearner, draw_revealed

C, D = 8, 64
CLASSES = "abcdefgh"


def build_learner(**options):
    return LabelTransformerLearner(text="random", **options)


def build_head(**options):
    return build_learner(**options).build_head(tuple(CLASSES), D)


class Scene:
    """A learner, its model, a batch, and a record of what reaches the head and leaves it."""

    def __init__(self, **options):
        self.learner = build_learner(**options)
        self.model = small_model(self.learner, CLASSES).double().eval()
        self.images = torch.randn(16, 3, 16, 16).double()
        self.labels = (torch.rand(16, C) < 0.4).double().masked_fill(torch.rand(16, C) < 0.1, -1)
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _record(self, head, inputs, output):
        self.known, self.logits = inputs[1], output.logits
        if output.logits.requires_grad:
            output.logits.retain_grad()

    def losses(self, labels=None, seed=3):
        local = local_of(self.model, self.learner, start=self.start, rng=torch.Generator().manual_seed(seed))
        assert not local.global_model.training  # and copied before there is a hook to copy
        labels = self.labels if labels is None else labels
        with self.model.head.register_forward_hook(self._record):
            return self.learner.losses(self.model, self.images, labels, local)["bce"]


def test_a_hidden_labels_logit_does_not_depend_on_its_truth_and_its_loss_does():
    scene = Scene()
    loss = scene.losses()
    known, logits = scene.known, scene.logits
    hidden = (known < 0) & (scene.labels >= 0)
    flipped = torch.where(hidden, 1 - scene.labels, scene.labels)
    other = scene.losses(flipped)
    assert hidden.any(dim=1).all()
    assert torch.equal(scene.known, known)
    assert torch.equal(scene.logits, logits)
    assert not torch.isclose(loss, other)


def test_revealed_labels_reach_the_head_and_change_the_other_logits():
    scene = Scene()
    scene.losses()
    revealed = scene.known >= 0
    assert revealed.any()
    assert torch.equal(scene.known[revealed], scene.labels[revealed])
    logits = scene.logits
    scene.losses(torch.where(revealed, 1 - scene.labels, scene.labels))
    touched = revealed.any(dim=1)
    assert (logits[touched] != scene.logits[touched]).any(dim=1).all()
    assert torch.equal(logits[~touched], scene.logits[~touched])


def test_the_loss_is_bce_over_the_labels_that_are_known_and_hidden():
    scene = Scene()
    loss = scene.losses()
    loss.backward()
    asked = (scene.known < 0) & (scene.labels >= 0)
    assert_close(loss, F.binary_cross_entropy_with_logits(scene.logits[asked], scene.labels[asked]))
    assert scene.logits.grad[~asked].count_nonzero() == 0
    assert scene.logits.grad[asked].all()


def test_labels_the_global_model_is_undecided_about_are_hidden_in_every_sample():
    scene = Scene()
    with torch.no_grad():
        p = scene.model(scene.images).logits.sigmoid()
        low, high = np.quantile(p, [0.3, 0.7])
        for weight in scene.model.parameters():  # local training moves on, the global model does not
            weight.add_(0.1 * torch.randn_like(weight))
    drawn = draw_revealed(scene.labels, 0.75, partial(torch.rand, generator=torch.Generator().manual_seed(3)))
    expected = -torch.ones(16, C).double()
    hidden_again = set()
    for i in range(16):
        for c in range(C):
            if drawn[i, c] and low <= p[i, c] <= high:
                hidden_again.add(i)
            elif drawn[i, c]:
                expected[i, c] = scene.labels[i, c]
    scene.learner = build_learner(band_low=low, band_high=high)
    scene.losses()
    assert len(hidden_again) > 4
    assert torch.equal(scene.known, expected)

    scene.learner = build_learner(band_low=1.0, band_high=0.0)
    scene.losses()
    assert torch.equal(scene.known >= 0, drawn)


def test_the_number_revealed_is_uniform_and_every_known_label_has_the_same_chance():
    n, unknown = 7000, [2, 5]
    labels = torch.zeros(n, C + 2)
    labels[:, unknown] = -1
    revealed = draw_revealed(labels, 0.75, partial(torch.rand, generator=torch.Generator().manual_seed(0)))
    assert not revealed[:, unknown].any()
    counts = np.bincount(revealed.sum(dim=1), minlength=7)
    assert len(counts) == 7  # 0 … 75 % of 8
    assert chisquare(counts).pvalue > 1e-3
    known = [c for c in range(C + 2) if c not in unknown]
    # each of the 8 labels is revealed with chance 3/8: mean 2625, standard deviation √(7000·3/8·5/8) = 40.5
    assert np.abs(revealed[:, known].sum(dim=0).numpy() - 2625).max() < 4 * 40.5


def test_nothing_is_revealed_of_nothing():
    rand = partial(torch.rand, generator=torch.Generator().manual_seed(0))
    assert not draw_revealed(-torch.ones(50, C), 0.75, rand).any()
    assert not draw_revealed(torch.zeros(50, C), 0.0, rand).any()


def test_evaluation_knows_no_label_and_repeats_itself():
    scene = Scene(dropout=0.5)
    head = scene.model.head
    feature_map = torch.randn(3, D, 2, 2).double()
    with torch.no_grad():
        first = head(feature_map).logits
        assert torch.equal(head(feature_map).logits, first)
        assert torch.equal(head(feature_map, -torch.ones(3, C)).logits, first)
        assert not torch.allclose(head.train()(feature_map).logits, first)


def test_the_head_by_hand():
    scene = Scene(layers=2, heads=2, ffn=48)
    head = scene.model.head
    feature_map = torch.randn(2, D, 2, 3).double()
    known = torch.tensor([[-1, 0, 1, -1, 0, 0, 1, 1], [1, -1, -1, 0, 1, 0, -1, 0]])
    expected = torch.empty(2, C).double()
    states = {-1: head.states[0], 0: head.states[1], 1: head.states[2]}
    for i in range(2):
        tokens = [feature_map[i, :, y, x] for y in range(2) for x in range(3)]
        tokens += [head.texts[c] + states[int(known[i, c])] for c in range(C)]
        x = torch.stack([F.layer_norm(token, (D,)) for token in tokens])
        for layer in head.encoder:
            x = post_norm_layer(x, layer, heads=2)
        for c in range(C):
            expected[i, c] = x[6 + c] @ head.classifier.weight[c] + head.classifier.bias[c]
    assert_close(head(feature_map, known).logits, expected)


def post_norm_layer(x, layer, heads):
    """An encoder layer as in Vaswani et al., 2017: LN(x + attention), LN(x + FFN with ReLU)."""
    assert layer.linear1.weight.shape == (48, D)
    Q, K, V = (
        x @ W.T + b
        for W, b in zip(layer.self_attn.in_proj_weight.chunk(3), layer.self_attn.in_proj_bias.chunk(3), strict=True)
    )
    size = D // heads
    parts = [
        torch.softmax(q @ k.T / size**0.5, dim=-1) @ v
        for q, k, v in zip(Q.split(size, 1), K.split(size, 1), V.split(size, 1), strict=True)
    ]
    x = F.layer_norm(x + layer.self_attn.out_proj(torch.cat(parts, dim=1)), (D,))
    return F.layer_norm(x + layer.linear2(layer.linear1(x).relu()), (D,))


def test_layers_start_different_and_every_weight_of_the_head_is_trained():
    scene = Scene()
    first, second, _ = scene.model.head.encoder
    assert not torch.equal(first.linear1.weight, second.linear1.weight)
    scene.losses().backward()
    assert all(p.grad is not None and p.grad.any() for p in scene.model.head.parameters())


def test_texts_and_states_are_frozen_unsent_and_the_same_for_every_training_seed():
    scene = Scene()
    head = scene.model.head
    assert not any("texts" in name or "states" in name for name in scene.model.state_dict())
    torch.manual_seed(1)
    other = build_head().double()
    assert torch.equal(other.texts, head.texts)
    assert torch.equal(other.states, head.states)
    assert_close(head.states @ head.states.T, torch.eye(3).double(), rtol=0, atol=1e-6)
    assert not torch.allclose(build_head(table_seed=1).states.double(), head.states)


def test_the_origin_of_the_texts_is_told():
    def decided(**options):
        return LabelTransformerLearner(**options).decided(pretrained=False)

    assert decided(text="random").note == "text table: random orthonormal stand-in"
    assert decided(text="some/voc20.npz").note == "text table: file voc20.npz"
    assert decided().text in {"clip", "random"}
    assert decided().clip_norm == 10
    with pytest.raises(FedncaError, match="text table 'bert' is not known"):
        decided(text="bert")


def test_heads_must_divide_the_channels():
    with pytest.raises(FedncaError, match="5 attention heads do not divide 64 channels"):
        build_head(heads=5)


def test_dropout_is_the_one_that_is_set():
    head = build_head(dropout=0.3)
    assert {module.p for module in head.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}
