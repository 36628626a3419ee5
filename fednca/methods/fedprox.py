"""FedProx (Li et al., 2020): FedAvg with a quadratic penalty that keeps clients near the global weights."""

import torch
from pydantic import Field

from fednca.methods.contract import About, Local, Method, Rule, Tensors, with_gradients
from fednca.methods.fedavg import LinearLearner


class Proximal(Rule):
    """A penalty on the distance between a client's weights and the global ones."""

    mu: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight μ of the penalty; 0 is FedAvg."""

    def penalties(self, local: Local) -> Tensors:
        """Return μ/2·‖w - w_global‖² over the trainable weights."""
        if not self.mu:
            return {}
        with torch.no_grad():
            drift = torch._foreach_sub(list(local.weights.values()), [local.start[name] for name in local.weights])
            term = self.mu / 2 * torch.stack(torch._foreach_norm(drift)).square().sum()
        return {"prox": with_gradients(term, torch._foreach_mul(drift, self.mu), local.weights)}


METHOD = Method(
    "fedprox",
    About(
        summary="FedAvg with a penalty on the distance between a client's weights and the global ones.",
        paper="Li et al., 2020",
        objective="BCE + proximal term",
        formula="L = BCE + μ/2·‖w - w_global‖²; w ← Σ_k w_k / K",
    ),
    LinearLearner(),
    Proximal(),
)
