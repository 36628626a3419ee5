import pytest
import torch
import torch.nn.functional as F
from helpers import small_model

from fednca.base.errors import FedncaError
from fednca.methods.fednca_ml import FedNCAMLLearner


def build(pretrained=False, **options):
    learner = FedNCAMLLearner(**options).decided(pretrained)
    return learner, small_model(learner)


def batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 16, 16, generator=generator)
    return images, (torch.rand(8, 6, generator=generator) < 0.4).float()


@pytest.mark.parametrize(
    ("pretrained", "options", "resolved"),
    [
        (False, {}, (1.0, 1.0, True)),
        (True, {}, (0.01, 1.0, True)),
        (True, {"lambda1": 0.5, "variant": "released"}, (0.5, 1.0, False)),
        (False, {"variant": "released", "position": True}, (1.0, 1.0, True)),
        (False, {"head": "etf"}, (0.0, 0.0, True)),
        (False, {"lambda1": 0.0, "lambda2": 0.0}, (0.0, 0.0, True)),
    ],
)
def test_what_is_left_open_follows_from_variant_head_and_backbone(pretrained, options, resolved):
    learner = FedNCAMLLearner(**options).decided(pretrained)
    assert (learner.lambda1, learner.lambda2, learner.position) == resolved


ROWS = [  # the component ablation after its FedAvg row, then the query ablation
    ({"head": "etf"}, {"bce"}),
    ({"lambda1": 0.0, "lambda2": 0.0}, {"bce"}),
    ({"lambda2": 0.0}, {"bce", "neg"}),
    ({"lambda1": 0.0}, {"bce", "pos"}),
    ({}, {"bce", "neg", "pos"}),
    ({"lambda1": 0.0, "lambda2": 0.0, "queries": "learnable", "query_init": "random"}, {"bce"}),
    ({"lambda1": 0.0, "lambda2": 0.0, "queries": "learnable"}, {"bce"}),
]


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize(("options", "terms"), ROWS)
def test_every_row_of_the_ablations_trains(options, terms, variant):
    learner, model = build(variant=variant, **options)
    losses = learner.losses(model, *batch(), None)
    assert set(losses) == terms
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_etf_is_neither_trained_nor_sent_and_the_same_for_every_training_seed():
    _, model = build()
    torch.manual_seed(1)
    other = FedNCAMLLearner().decided(pretrained=False).build_head(tuple("abcdef"), 64)
    assert not any("prototypes" in name or "queries" in name for name in model.state_dict())
    assert torch.equal(model.head.prototypes, other.prototypes)
    assert torch.equal(model.head.ladm.queries, model.head.prototypes)


def test_train_etf_makes_it_a_weight_like_any_other():
    learner, model = build(train_etf=True)
    assert "head.prototypes" in model.state_dict()
    sum(learner.losses(model, *batch(), None).values()).backward()
    assert model.head.prototypes.grad.abs().sum() > 0


def test_learnable_queries_are_sent_and_start_where_they_should():
    _, fixed = build()
    _, model = build(queries="learnable", lambda1=0.0, lambda2=0.0)
    _, random = build(queries="learnable", query_init="random", lambda1=0.0, lambda2=0.0)
    assert torch.equal(model.state_dict()["head.ladm.queries"], fixed.head.prototypes)
    start = random.state_dict()["head.ladm.queries"]
    torch.testing.assert_close(start.norm(dim=1), torch.ones(6))
    assert not torch.allclose(start @ start.T, fixed.head.prototypes @ fixed.head.prototypes.T, atol=0.05)


def test_released_computation_from_its_parts():
    learner, model = build(variant="released", lambda1=0.3, lambda2=0.7)
    assert learner.betas == (0.9, 0.98)
    assert torch.equal(model.head.prototypes.count_nonzero(dim=0) > 0, torch.arange(64) < 6)  # U: the first axes
    images, labels = batch()
    with torch.no_grad():
        model.head.scale.fill_(7.0)
        model.head.bias.copy_(torch.arange(6) / 10)
    model.eval()
    losses = learner.losses(model, images, labels, None)
    H, M = model(images).features, model.head.prototypes
    scores = 7.0 * H @ M.T + torch.arange(6) / 10

    logits = scores.diagonal(dim1=1, dim2=2)
    bce = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / 8
    torch.testing.assert_close(losses["bce"], bce)

    hinge = (scores.amax(-1).sigmoid() - 0.3).relu()[labels == 0]
    hardest = hinge.topk(min(len(hinge), int(labels.sum()))).values
    torch.testing.assert_close(losses["neg"], 0.3 * hardest.sum() / 8)

    cosine = F.cosine_similarity(H[:, :, None], M[None, None], dim=-1) / 0.07
    own = F.cross_entropy(cosine.flatten(0, 1), torch.arange(6).repeat(8), reduction="none").view(8, 6)
    torch.testing.assert_close(losses["pos"], 0.7 * (own * labels).sum() / 8)


def test_a_pooled_head_refuses_the_regularisers():
    with pytest.raises(FedncaError, match="head 'etf' has no feature per class"):
        FedNCAMLLearner(head="etf", lambda2=1.0).decided(pretrained=False)
