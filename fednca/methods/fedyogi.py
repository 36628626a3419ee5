"""FedYogi (Reddi et al., 2021): FedAdam with Yogi's second moment, which forgets large changes only slowly."""

from torch import Tensor

from fednca.methods.contract import About, Method
from fednca.methods.fedadam import ServerAdam
from fednca.methods.fedavg import LinearLearner


class ServerYogi(ServerAdam):
    """Adam with Yogi's second moment v, which moves towards Δ² by steps of (1-β2)·Δ², however far away it is."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v from Δ²."""
        return v - (1 - self.beta2) * square * (v - square).sign()


METHOD = Method(
    "fedyogi",
    About(
        summary="FedAdam with Yogi's second moment v, which moves towards Δ² by steps of (1-β2)·Δ², however far it is.",
        paper="Reddi et al., 2021",
        formula="Δ = Σ_k w_k / K - w; m ← β1·m + (1-β1)·Δ; v ← v - (1-β2)·Δ²·sign(v - Δ²); w ← w + η·m/(√v + τ)",
        state="m, v",
        aggregation="Yogi on Δ",
    ),
    LinearLearner(),
    ServerYogi(),
)
