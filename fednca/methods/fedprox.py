"""FedProx (Li et al., 2020): FedAvg whose clients are held near the global weights by a quadratic penalty."""

import torch
from pydantic import Field

from fednca.methods.base import About, Local, Tensors, with_gradients
from fednca.methods.fedavg import FedAvg, FedAvgHyper


class FedProxHyper(FedAvgHyper):
    """FedProx's choices."""

    mu: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight μ of the penalty; 0 is FedAvg."""


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
        with torch.no_grad():
            drift = torch._foreach_sub(list(local.weights.values()), [local.start[name] for name in local.weights])
            term = self.hyper.mu / 2 * torch.stack(torch._foreach_norm(drift)).square().sum()
        return {"prox": with_gradients(term, torch._foreach_mul(drift, self.hyper.mu), local.weights)}


METHOD = FedProx
