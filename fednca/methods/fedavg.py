"""FedAvg (McMahan et al., 2017): local training on BCE, plain average of weights and buffers."""

from typing import Literal

from torch import Tensor, nn

from fednca.losses import bce
from fednca.methods.base import Local, Method, Task, Tensors
from fednca.models.heads import LinearHead, MLPHead
from fednca.options import Options


class FedAvgHyper(Options):
    """FedAvg's choices."""

    head: Literal["linear", "mlp"] = "linear"
    """One linear layer as in the paper, or the two-layer head of the authors' code."""


class FedAvg(Method):
    """Linear head, BCE, average."""

    Hyper = FedAvgHyper
    summary = "local BCE on a linear head, weights averaged"
    paper = "McMahan et al., 2017"
    hyper: FedAvgHyper

    def head(self, task: Task) -> nn.Module:
        """Build the linear or two-layer head."""
        build = LinearHead if self.hyper.head == "linear" else MLPHead
        return build(task.dim, len(task.classes))

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return BCE, the mean over samples and classes."""
        return {"bce": bce(model(images).logits, labels)}


METHOD = FedAvg
