"""FedProx (Li et al., 2020): FedAvg whose clients are held near the global weights by a quadratic penalty."""

from pydantic import Field

from fednca.methods.base import About, Local, Tensors
from fednca.methods.fedavg import FedAvg, FedAvgHyper
from fednca.packed import flat


class FedProxHyper(FedAvgHyper):
    """FedProx's choices."""

    mu: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight μ of the proximal term; 0 is FedAvg."""


class FedProx(FedAvg):
    """FedAvg with a penalty on the distance between a client's weights and the global ones."""

    Hyper = FedProxHyper
    about = About(
        paper="Li et al., 2020",
        objective="BCE + proximal term",
        formula="L = BCE + μ/2·‖w - w_global‖²; w ← Σ_k w_k / K",
    )
    hyper: FedProxHyper

    def penalties(self, local: Local) -> Tensors:
        """Return μ/2·‖w - w_global‖² over the trainable weights."""
        if not self.hyper.mu:
            return {}
        drift = flat(local.weights.values()) - flat(local.start[name] for name in local.weights)
        return {"prox": self.hyper.mu / 2 * drift.square().sum()}


METHOD = FedProx
