"""FedNCA-ML: one feature per class by attention, a fixed simplex ETF as classifier, two regularisers, plain averaging.

`variant = "paper"` is what the paper's equations say, `"released"` what its authors' code computes. The rows of the
component ablation are `fedavg`, `head = "etf"`, and `head = "ladm-etf"` with `lambda1` and `lambda2` at 0 or not; those
of the query ablation are `queries` and `query_init` with both at 0.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fednca.errors import FedncaError
from fednca.losses import bce, bce_sum, objective, objective_released
from fednca.methods.base import About, Local, Method, Task, Tensors
from fednca.models import LADM, ETFHead, LADMHead, simplex_etf
from fednca.options import Options
from fednca.randomness import numpy_rng


class FedNCAMLHyper(Options):
    """FedNCA-ML's choices; what is left out follows from the variant, the head and the backbone."""

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


class FedNCAML(Method):
    """One attention feature per class (LADM), compared with fixed class vectors as far apart as possible (ETF)."""

    Hyper = FedNCAMLHyper
    about = About(
        paper="FedNCA-ML",
        head="feature per class (LADM) + fixed class vectors (ETF)",
        objective="BCE + λ1·L_Neg + λ2·L_Pos",
        formula="ŷ_c = σ(h_c·m_c); L = BCE + λ1·L_Neg + λ2·L_Pos; w ← Σ_k w_k / K",
    )
    hyper: FedNCAMLHyper

    def settle(self) -> None:
        """Choose the losses' weights and the variant's defaults."""
        has_class_features = self.hyper.head == "ladm-etf"
        if not has_class_features and (self.hyper.lambda1 or self.hyper.lambda2):
            raise FedncaError(
                f"head '{self.hyper.head}' has no feature per class for lambda1 and lambda2 to act on; leave them out"
            )
        weight_of_negatives = 0.01 if self.pretrained else 1.0
        defaults: dict[str, float | bool] = {
            "lambda1": weight_of_negatives if has_class_features else 0.0,
            "lambda2": 1.0 if has_class_features else 0.0,
            "position": self.hyper.variant == "paper",
        }
        self.with_hyper(**{name: value for name, value in defaults.items() if getattr(self.hyper, name) is None})
        if self.hyper.variant == "released":
            self.betas = (0.9, 0.98)

    def head(self, task: Task) -> nn.Module:
        """Build attention and classifier, or the classifier alone."""
        hyper, classes = self.hyper, len(task.classes)
        released = hyper.variant == "released"
        prototypes = simplex_etf(classes, task.dim, hyper.etf_seed, basis="axes" if released else "random")
        if hyper.head == "etf":
            return ETFHead(prototypes, affine=released, trainable=hyper.train_etf)
        queries = prototypes if hyper.query_init == "etf" else random_queries(classes, task.dim, hyper.etf_seed)
        ladm = LADM(
            task.dim,
            queries,
            heads=hyper.heads,
            position=bool(hyper.position),
            learnable_queries=hyper.queries == "learnable",
        )
        return LADMHead(ladm, prototypes, affine=released, trainable=hyper.train_etf)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return BCE, λ1·L_Neg and λ2·L_Pos."""
        output = model(images)
        hyper = self.hyper
        weights = {"lambda1": hyper.lambda1 or 0.0, "lambda2": hyper.lambda2 or 0.0, "tau": hyper.tau}
        if hyper.variant == "paper":
            return objective(output, labels, criterion=self.criterion or bce, **weights)
        head = model.get_submodule("head")
        assert isinstance(head, ETFHead | LADMHead)
        assert head.scale is not None
        assert head.bias is not None
        return objective_released(
            output, labels, head.prototypes, head.scale, head.bias, criterion=self.criterion or bce_sum, **weights
        )


def random_queries(num_classes: int, dim: int, seed: int) -> Tensor:
    """Return random unit queries (C, d), the baseline of the query ablation."""
    drawn = numpy_rng(seed, "queries").standard_normal((num_classes, dim))
    return torch.from_numpy((drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32))


METHOD = FedNCAML
