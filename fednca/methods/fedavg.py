"""FedAvg (McMahan et al., 2017): local training on BCE, plain average of weights and buffers."""

from typing import Literal

from torch import nn

from fednca.methods.base import About, Method, Task
from fednca.models.heads import LinearHead, MLPHead
from fednca.options import Options


class FedAvgHyper(Options):
    """FedAvg's choices."""

    head: Literal["linear", "mlp"] = "linear"
    """The head: one linear layer as in FedNCA-ML's paper, or two layers as in its authors' code."""


class FedAvg(Method):
    """Clients train on BCE with a linear head, and the server averages their weights and buffers."""

    Hyper = FedAvgHyper
    about = About(paper="McMahan et al., 2017", formula="w ← Σ_k w_k / K")
    hyper: FedAvgHyper

    def head(self, task: Task) -> nn.Module:
        """Build the linear or two-layer head."""
        build = LinearHead if self.hyper.head == "linear" else MLPHead
        return build(task.dim, len(task.classes))


METHOD = FedAvg
