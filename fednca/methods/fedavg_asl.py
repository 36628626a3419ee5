"""FedAvg on the asymmetric loss (Ridnik et al., 2021), in which the many easy negatives count less."""

from typing import ClassVar

from pydantic import Field, field_validator
from torch import Tensor

from fednca.measures.losses import asymmetric
from fednca.methods.contract import About, Method
from fednca.methods.fedavg import LinearLearner


class AsymmetricLearner(LinearLearner):
    """The asymmetric loss on the globally pooled feature."""

    own_loss: ClassVar[bool] = True

    gamma_neg: float = Field(default=4.0, ge=0, allow_inf_nan=False)
    """Exponent γ₋: a larger one makes easy negatives (absent classes) count less; 0, or at least 1."""
    gamma_pos: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Exponent γ₊: a larger one makes easy positives (present classes) count less; 0, or at least 1."""
    clip: float = Field(default=0.05, ge=0, lt=1)
    """Negatives with a predicted probability up to this do not count at all."""

    @field_validator("gamma_neg", "gamma_pos")
    @classmethod
    def _has_finite_slope(cls, gamma: float) -> float:
        if 0 < gamma < 1:
            raise ValueError(f"a power of {gamma} has no finite slope at 0; use 0 or at least 1")
        return gamma

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the asymmetric loss."""
        return asymmetric(logits, labels, gamma_neg=self.gamma_neg, gamma_pos=self.gamma_pos, clip=self.clip)


METHOD = Method(
    "fedavg-asl",
    About(
        summary="FedAvg with the asymmetric loss: easy negatives count less, and the easiest not at all.",
        paper="Ridnik et al., 2021",
        objective="asymmetric loss",
        formula="L = -y·(1-p)^γ₊·log p - (1-y)·q^γ₋·log(1-q), q = max(p - clip, 0); w ← Σ_k w_k / K",
    ),
    AsymmetricLearner(),
)
