"""FedAvg on the asymmetric loss (Ridnik et al., 2021), which turns down the many easy negatives."""

from functools import partial

from pydantic import Field, field_validator

from fednca.losses import asymmetric
from fednca.methods.base import About
from fednca.methods.fedavg import FedAvg, FedAvgHyper


class FedAvgASLHyper(FedAvgHyper):
    """FedAvg's choices and those of the asymmetric loss."""

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


class FedAvgASL(FedAvg):
    """FedAvg with the asymmetric loss: easy negatives count less, and the easiest not at all."""

    Hyper = FedAvgASLHyper
    about = About(
        paper="Ridnik et al., 2021",
        objective="asymmetric loss",
        formula="L = -y·(1-p)^γ₊·log p - (1-y)·q^γ₋·log(1-q), q = max(p - clip, 0); w ← Σ_k w_k / K",
    )
    hyper: FedAvgASLHyper

    def settle(self) -> None:
        """Fix the loss's powers and its clip."""
        own = self.hyper
        self.criterion = partial(asymmetric, gamma_neg=own.gamma_neg, gamma_pos=own.gamma_pos, clip=own.clip)


METHOD = FedAvgASL
