"""FedCurv (Shoham et al., 2019): clients hardly change weights that matter to others, by the others' Fisher diagonals.

With u_j the Fisher diagonal of client j at its own weights w_j, v_j = u_j·w_j, and U, V their sums over j, the penalty
on client k is λ·Σ_{j≠k} (w - w_j)ᵀ diag(u_j) (w - w_j) = λ·[wᵀ diag(U - u_k) w - 2·wᵀ(V - v_k)] + terms without w,
which are left out: the reported loss may be negative.

The Fisher diagonal is the empirical one: the mean over a client's samples of the squared per-sample gradients of its
local loss, with the true labels, in evaluation mode. If that loss is a mean over C classes, the Fisher shrinks with
1/C², so the same λ weighs less the more classes there are.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fednca.base.tensors import join
from fednca.measures.fisher import fisher_sums
from fednca.methods.contract import About, Local, Method, Rule, Server, Tensors, Update, average, with_gradients
from fednca.methods.fedavg import LinearLearner


class OthersCurvature(Rule):
    """A penalty for moving away from the other clients' last weights, weighted by their Fisher information."""

    adds_up: ClassVar[bool] = True
    copies: ClassVar[int] = 2

    lam: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight λ of the penalty; 0 is FedAvg."""

    def start_client(self, weights: Tensors) -> Tensors:
        """Return u_k = v_k = 0."""
        return {f"{kind}/{name}": torch.zeros_like(weight) for kind in "uv" for name, weight in weights.items()}

    def start_server(self, weights: Tensors, clients: int) -> Tensors:
        """Return zeros in place of every client's first upload.

        The server keeps every upload. If it only added changes to U and V, these would keep the rounding errors of
        early rounds, whose Fisher diagonals are large, next to the small ones of later rounds.
        """
        zeros = self.start_client(weights)
        return {f"{k}/{name}": zero for k in range(clients) for name, zero in zeros.items()}

    def send(self, server: Server) -> Tensors:
        """Return U and V, the sums of all clients' last uploads."""
        clients = 1 + max(int(path.partition("/")[0]) for path in server.state)
        names = [path.removeprefix("0/") for path in server.state if path.startswith("0/")]
        uploads = [{name: server.state[f"{k}/{name}"] for name in names} for k in range(clients)]
        return average(uploads, [1.0] * clients)  # shares of 1: a sum

    def penalties(self, local: Local) -> Tensors:
        """Return λ·[wᵀ diag(U - u_k) w - 2·wᵀ(V - v_k)]."""
        if not self.lam:
            return {}
        with torch.no_grad():
            w = list(local.weights.values())
            u, v = (self._of_others(local, kind) for kind in "uv")
            slope = torch._foreach_sub(torch._foreach_mul(u, w), v)  # half the gradient: diag(U - u_k) w - (V - v_k)
            term = join(torch._foreach_mul(w, torch._foreach_sub(slope, v))).sum()
            torch._foreach_mul_(slope, 2 * self.lam)
        return {"curv": with_gradients(self.lam * term, slope, local.weights)}

    def _of_others(self, local: Local, kind: str) -> tuple[Tensor, ...]:
        """Return U - u_k or V - v_k by weight."""
        names = [f"{kind}/{name}" for name in local.weights]
        return torch._foreach_sub(*([tensors[name] for name in names] for tensors in (local.received, local.state)))

    def sums(self, local: Local, images: Tensor, labels: Tensor) -> Tensors:
        """Return the sums of squared gradients whose means are u_k."""
        return fisher_sums(local.losses, local.model, local.weights, images, labels)

    def finish(self, local: Local, sums: Tensors) -> Tensors:
        """Compute u_k and v_k from this round, keep them and return copies."""
        for name, total in sums.items():
            u = total / local.samples
            local.state |= {f"u/{name}": u, f"v/{name}": u * local.weights[name].detach()}
        return {name: tensor.clone() for name, tensor in local.state.items()}  # so that client and server share none

    def combine(self, server: Server, updates: list[Update], shares: list[float], clients: int) -> Server:
        """Average the weights, and keep each client's last upload."""
        uploads = {f"{update.client}/{name}": each for update in updates for name, each in update.extra.items()}
        return Server(super().combine(server, updates, shares, clients).weights, server.state | uploads)


METHOD = Method(
    "fedcurv",
    About(
        summary="FedAvg with a penalty for changing weights that matter to other clients, by their Fisher information.",
        paper="Shoham et al., 2019",
        objective="BCE + curvature penalty",
        formula="L = BCE + λ·[wᵀ diag(U - u_k) w - 2·wᵀ(V - v_k)]; u_k = Fisher, v_k = u_k·w_k, "
        "U = Σ_k u_k, V = Σ_k v_k; w ← Σ_k w_k / K",
        state="u_k, v_k",
    ),
    LinearLearner(),
    OthersCurvature(),
)
