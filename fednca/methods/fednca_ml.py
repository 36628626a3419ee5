"""FedNCA-ML: one feature per class by attention, a fixed simplex ETF as classifier, two regularisers, plain averaging.

`variant = "paper"` computes what the paper's equations say, `"released"` what its authors' code does. The paper's
component ablation compares `fedavg`, `head = "etf"`, and `head = "ladm-etf"` with `lambda1` and `lambda2` at 0 or not;
its query ablation varies `queries` and `query_init` with both at 0.
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
    """BCE and two regularisers on one attention feature per class; variant and head set the defaults left open."""

    variant: Literal["paper", "released"] = "paper"
    """Compute what the paper's equations say, or what its authors' code does."""
    head: Literal["ladm-etf", "etf"] = "ladm-etf"
    """Compare the class vectors (ETF) with one attention feature per class (LADM), or with the pooled feature."""
    lambda1: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight of L_Neg (keeps absent classes' features away from other classes); default 1, or 0.01 if pretrained."""
    lambda2: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight of L_Pos (pulls present classes' features to their own class vector); default 1."""
    tau: float = Field(default=0.3, gt=0, lt=1)
    """L_Neg acts on an absent class's feature if its probability for another class is above this."""
    heads: int = Field(default=4, ge=1)
    """Number of attention heads."""
    position: bool | None = None
    """Tell the attention where in the image a feature is; default on for `paper`, off for `released`."""
    queries: Literal["fixed", "learnable"] = "fixed"
    """Keep or train the queries: the vectors with which the attention looks for each class."""
    query_init: Literal["etf", "random"] = "etf"
    """Start the queries as the class vectors, or at random."""
    etf_seed: int = Field(default=0, ge=0)
    """Seed that orients the class vectors; the same for all clients, independent of the training seed."""
    train_etf: bool = False
    """Train, upload and average the class vectors like any weight, as the authors' code does; not the queries."""

    @property
    def betas(self) -> tuple[float, float] | None:
        """AdamW's betas in the authors' code, for its variant."""
        return (0.9, 0.98) if self.variant == "released" else None

    def decided(self, pretrained: bool) -> Self:
        """Set λ1, λ2 and the position table if they are left open."""
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
        """Return BCE; the released variant sums it over classes."""
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
        summary="One attention feature per class (LADM), compared with class vectors as far apart as possible (ETF).",
        paper="FedNCA-ML",
        head="feature per class (LADM) + fixed class vectors (ETF)",
        objective="BCE + λ1·L_Neg + λ2·L_Pos",
        formula="ŷ_c = σ(h_c·m_c); L = BCE + λ1·L_Neg + λ2·L_Pos; w ← Σ_k w_k / K",
    ),
    FedNCAMLLearner(),
)
