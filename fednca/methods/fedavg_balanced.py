"""FedAvg on class-balanced BCE: positives and negatives weigh the same, however rare the positives are."""

from typing import ClassVar

from torch import Tensor

from fednca.measures.losses import balanced_bce
from fednca.methods.contract import About, Method
from fednca.methods.fedavg import LinearLearner


class BalancedLearner(LinearLearner):
    """BCE whose positives and negatives are averaged separately."""

    own_loss: ClassVar[bool] = True

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return class-balanced BCE."""
        return balanced_bce(logits, labels)


METHOD = Method(
    "fedavg-balanced",
    About(
        summary="FedAvg with a BCE in which positives and negatives weigh the same, however rare the positives are.",
        paper="McMahan et al., 2017",
        objective="class-balanced BCE",
        formula="L = ½·mean_{y=1} -log σ(a) + ½·mean_{y=0} -log(1 - σ(a)); w ← Σ_k w_k / K",
    ),
    BalancedLearner(),
)
