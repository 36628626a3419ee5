"""FedCurv (Shoham et al., 2019): clients keep the weights that matter to the others, by the others' Fisher diagonals.

With u_j the Fisher diagonal of client j at its own weights w_j, v_j = u_j·w_j, and U, V their sums over j, the penalty
on client k is λ·Σ_{j≠k} (w - w_j)ᵀ diag(u_j) (w - w_j) = λ·[wᵀ diag(U - u_k) w - 2·wᵀ(V - v_k)] + terms without w,
which are left out: the reported loss may be negative.

The Fisher diagonal is the empirical one: the mean over a client's samples of the squared per-sample gradients of its
local loss, with the true labels, in evaluation mode. Where that loss is a mean over C classes the Fisher shrinks with
1/C², so the same λ weighs less the more classes there are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fednca.methods.base import About, Batches, Local, Method, Server, Tensors, Update, average
from fednca.methods.fedavg import FedAvg, FedAvgHyper
from fednca.packed import flat

HELD = 1 << 26  # numbers in the per-sample gradients held at once, each gradient as large as the model
MOST = 32  # samples at once, however small the model


class FedCurvHyper(FedAvgHyper):
    """FedCurv's choices."""

    lam: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight λ of the other clients' curvature; 0 is FedAvg."""


class FedCurv(FedAvg):
    """FedAvg with a penalty on leaving the other clients' last weights, weighted by their Fisher information."""

    Hyper = FedCurvHyper
    about = About(
        paper="Shoham et al., 2019",
        objective="BCE + others' curvature",
        formula="L = BCE + λ·[wᵀ diag(U - u_k) w - 2·wᵀ(V - v_k)]; u_k = Fisher, v_k = u_k·w_k; w ← Σ_k w_k / K",
        state="u_k, v_k",
    )
    hyper: FedCurvHyper
    extra_copies = 2

    def start_client(self, weights: Tensors) -> Tensors:
        """Return u_k = v_k = 0."""
        return {f"{kind}/{name}": torch.zeros_like(weight) for kind in "uv" for name, weight in weights.items()}

    def start_server(self, weights: Tensors) -> Tensors:
        """Return zeros in place of every client's first upload."""
        clients = range(self.clients)
        return {f"{k}/{name}": zeros for k in clients for name, zeros in self.start_client(weights).items()}

    def send(self, server: Server) -> Tensors:
        """Return U and V, the sums of all clients' last uploads."""
        names = [path.removeprefix("0/") for path in server.state if path.startswith("0/")]
        uploads = [{name: server.state[f"{k}/{name}"] for name in names} for k in range(self.clients)]
        return average(uploads, [1.0] * self.clients)  # shares of 1: a sum

    def penalties(self, local: Local) -> Tensors:
        """Return λ·[wᵀ diag(U - u_k) w - 2·wᵀ(V - v_k)]."""
        if not self.hyper.lam:
            return {}
        w = flat(local.weights.values())
        u, v = (
            flat(local.received[f"{kind}/{name}"] for name in local.weights)
            - flat(local.state[f"{kind}/{name}"] for name in local.weights)
            for kind in "uv"
        )
        return {"curv": self.hyper.lam * (w * (u * w - 2 * v)).sum()}

    def finish(self, local: Local, batches: Batches) -> Tensors:
        """Renew and return u_k and v_k."""
        for name, u in fisher_diagonal(self.learner, local, batches).items():
            local.state |= {f"u/{name}": u, f"v/{name}": u * local.weights[name].detach()}
        return {name: tensor.clone() for name, tensor in local.state.items()}  # client and server keep their own

    def aggregate(self, server: Server, updates: list[Update], shares: list[float]) -> Server:
        """Average the weights, and keep each client's last upload."""
        uploads = {f"{update.client}/{name}": each for update in updates for name, each in update.extra.items()}
        return Server(super().aggregate(server, updates, shares).weights, server.state | uploads)


class LocalLoss(nn.Module):
    """A learner's loss as a module, which `functional_call` can evaluate at other weights."""

    def __init__(self, learner: Method, local: Local) -> None:
        """Take the learner and the client whose model it trains."""
        super().__init__()
        self.learner, self.local, self.model = learner, local, local.model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the loss's terms."""
        terms = self.learner.losses(self.model, images, labels, self.local)
        return torch.stack(list(terms.values())).sum()


def fisher_diagonal(learner: Method, local: Local, batches: Batches) -> Tensors:
    """Return the mean over samples of the squared per-sample gradients of the learner's loss, by name of weight."""
    local.model.eval()  # BatchNorm would mix the samples
    loss = LocalLoss(learner, local)
    weights = {name: weight.detach() for name, weight in local.weights.items()}

    def loss_of_one(weights: Tensors, image: Tensor, label: Tensor) -> Tensor:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        value: Tensor = functional_call(loss, named, (image[None], label[None]))
        return value

    gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    samples = 0
    at_once = min(MOST, max(1, HELD // sum(weight.numel() for weight in weights.values())))
    with plain_attention():
        for images, labels in batches:
            for chunk in zip(torch.split(images, at_once), torch.split(labels, at_once), strict=True):
                for name, each in gradients(weights, *chunk).items():
                    totals[name] += each.square().sum(0)
            samples += len(images)
    return {name: total / samples for name, total in totals.items()}


@contextmanager
def plain_attention() -> Iterator[None]:
    """Keep attention to elementary operations, since its fused kernels cannot be mapped over samples."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


METHOD = FedCurv
