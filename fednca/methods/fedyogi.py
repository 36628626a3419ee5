"""FedYogi (Reddi et al., 2021): FedAdam with Yogi's second moment, which forgets large changes only slowly."""

from torch import Tensor

from fednca.methods.contract import About, Method
from fednca.methods.fedadam import ServerAdam
from fednca.methods.fedavg import LinearLearner


class ServerYogi(ServerAdam):
    """Adam whose second moment moves towards the squared change by a step that does not depend on their distance."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v from Δ²."""
        return v - (1 - self.beta2) * square * (v - square).sign()


METHOD = Method(
    "fedyogi",
    About(
        summary="FedAdam whose second moment moves by a step that does not depend on its distance from the change.",
        paper="Reddi et al., 2021",
        formula="Δ = Σ_k w_k / K - w; m ← β1·m + (1-β1)·Δ; v ← v - (1-β2)·Δ²·sign(v - Δ²); w ← w + η·m/(√v + τ)",
        state="m, v",
        aggregation="Yogi on Δ",
    ),
    LinearLearner(),
    ServerYogi(),
)
