"""FedNCA-ML: one feature per class by attention, a fixed simplex ETF as classifier, two regularisers, plain averaging.

`variant = "paper"` is what the paper's equations say, `"released"` what its authors' code computes. The rows of the
component ablation are `fedavg`, `head = "etf"`, and `head = "ladm-etf"` with `lambda1` and `lambda2` at 0 or not; those
of the query ablation are `queries` and `query_init` with both at 0.
"""

from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fednca.base.errors import FedncaError
from fednca.base.randomness import numpy_rng
from fednca.measures.losses import bce_sum, objective, objective_released
from fednca.methods.contract import About, Learner, Local, Method, Tensors
from fednca.models import LADM, ETFHead, LADMHead, simplex_etf
from fednca.models.heads import Head


class FedNCAMLLearner(Learner):
    """BCE and two regularisers on one attention feature per class; what is left out follows from variant and head."""

    variant: Literal["paper", "released"] = "paper"
    """The paper's equations, or the computation of its authors' code."""
    head: Literal["ladm-etf", "etf"] = "ladm-etf"
    """The ETF on one attention feature per class, or on the pooled feature."""
    lambda1: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight of the negative feature rejection; left out: 1 from scratch, 0.01 from pretrained weights."""
    lambda2: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight of the positive feature contrast; left out: 1."""
    tau: float = Field(default=0.3, gt=0, lt=1)
    """Similarity above which a negative feature is rejected."""
    heads: int = Field(default=4, ge=1)
    """Attention heads."""
    position: bool | None = None
    """Add the sine-cosine position table; left out: on for `paper`, off for `released`."""
    queries: Literal["fixed", "learnable"] = "fixed"
    """Whether the class queries are trained."""
    query_init: Literal["etf", "random"] = "etf"
    """What the class queries start as."""
    etf_seed: int = Field(default=0, ge=0)
    """Seed of the ETF's orientation: the same for all clients and training seeds."""
    train_etf: bool = False
    """Train, average and send the classifier's ETF like any weight, as the authors' code does; queries stay as set."""

    @property
    def betas(self) -> tuple[float, float] | None:
        """AdamW's betas as released."""
        return (0.9, 0.98) if self.variant == "released" else None

    def decided(self, pretrained: bool) -> Self:
        """Choose the losses' weights and the variant's defaults."""
        has_class_features = self.head == "ladm-etf"
        if not has_class_features and (self.lambda1 or self.lambda2):
            raise FedncaError(
                f"head '{self.head}' has no feature per class for lambda1 and lambda2 to act on; leave them out"
            )
        weight_of_negatives = 0.01 if pretrained else 1.0
        defaults: dict[str, float | bool] = {
            "lambda1": weight_of_negatives if has_class_features else 0.0,
            "lambda2": 1.0 if has_class_features else 0.0,
            "position": self.variant == "paper",
        }
        return self.model_copy(update={name: each for name, each in defaults.items() if getattr(self, name) is None})

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build attention and classifier, or the classifier alone."""
        released = self.variant == "released"
        prototypes = simplex_etf(len(classes), dim, self.etf_seed, basis="axes" if released else "random")
        if self.head == "etf":
            return ETFHead(prototypes, affine=released, trainable=self.train_etf)
        queries = prototypes if self.query_init == "etf" else random_queries(len(classes), dim, self.etf_seed)
        ladm = LADM(
            dim,
            queries,
            heads=self.heads,
            position=bool(self.position),
            learnable_queries=self.queries == "learnable",
        )
        return LADMHead(ladm, prototypes, affine=released, trainable=self.train_etf)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return BCE, in the released variant summed over classes."""
        summed = self.criterion is None and self.variant == "released"
        return bce_sum(logits, labels) if summed else super().loss(logits, labels)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return BCE, λ1·L_Neg and λ2·L_Pos."""
        output = model(images)
        weights = {"lambda1": self.lambda1 or 0.0, "lambda2": self.lambda2 or 0.0, "tau": self.tau}
        if self.variant == "paper":
            return objective(output, labels, criterion=self.loss, **weights)
        head = model.get_submodule("head")
        assert isinstance(head, ETFHead | LADMHead)
        assert head.scale is not None
        assert head.bias is not None
        return objective_released(
            output, labels, head.prototypes, head.scale, head.bias, criterion=self.loss, **weights
        )


def random_queries(num_classes: int, dim: int, seed: int) -> Tensor:
    """Return random unit queries (C, d), the baseline of the query ablation."""
    drawn = numpy_rng(seed, "queries").standard_normal((num_classes, dim))
    return torch.from_numpy((drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32))


METHOD = Method(
    "fednca-ml",
    About(
        summary="One attention feature per class, a fixed simplex ETF as classifier, two regularisers, weights averaged.",
        paper="FedNCA-ML",
        head="LADM + fixed ETF",
        objective="BCE + λ1·L_Neg + λ2·L_Pos",
        formula="ŷ_c = σ(h_c·m_c); L = BCE + λ1·L_Neg + λ2·L_Pos; w ← Σ_k w_k / K",
    ),
    FedNCAMLLearner(),
)
