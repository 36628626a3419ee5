"""FedYogi (Reddi et al., 2021): FedAdam with Yogi's second moment, which forgets large changes only slowly."""

from torch import Tensor

from fednca.methods.base import About
from fednca.methods.fedadam import FedAdam


class FedYogi(FedAdam):
    """FedAdam with Yogi's second moment v, which moves towards Δ² by steps of (1-β2)·Δ², however far away it is."""

    about = About(
        paper="Reddi et al., 2021",
        formula="Δ = Σ_k w_k / K - w; m ← β1·m + (1-β1)·Δ; v ← v - (1-β2)·Δ²·sign(v - Δ²); w ← w + η·m/(√v + τ)",
        state="m, v",
        aggregation="Yogi on Δ",
    )

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v from Δ²."""
        return v - (1 - self.hyper.beta2) * square * (v - square).sign()


METHOD = FedYogi
