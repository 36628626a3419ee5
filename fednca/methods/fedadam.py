"""FedAdam (Reddi et al., 2021): the server treats the clients' mean change as a gradient and applies Adam to it."""

import torch
from pydantic import Field
from torch import Tensor

from fednca.methods.contract import About, Method, Rule, Server, Tensors, Update
from fednca.methods.fedavg import LinearLearner


class ServerAdam(Rule):
    """An Adam step along the clients' average change, without bias correction; all defaults but η are the paper's."""

    server_lr: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """Learning rate η of the server: roughly the largest change of a weight in a round; the paper tunes it by task."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay β1: the share of the running mean of the changes that each round keeps."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay β2: the share of the running mean of the squared changes that each round keeps."""
    tau: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """τ, added to √v so that changes far smaller than τ are not scaled up to η."""

    def start_server(self, weights: Tensors, clients: int) -> Tensors:
        """Return m = 0 and v = τ²."""
        first = {f"m/{name}": torch.zeros_like(weight) for name, weight in weights.items()}
        return first | {f"v/{name}": torch.full_like(weight, self.tau**2) for name, weight in weights.items()}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v from Δ²."""
        return self.beta2 * v + (1 - self.beta2) * square

    def combine(self, server: Server, updates: list[Update], shares: list[float], clients: int) -> Server:
        """Average everything, then move each trainable weight by an Adam step in place of going to its average."""
        weights = super().combine(server, updates, shares, clients).weights
        state: Tensors = {}
        for name in [path.removeprefix("m/") for path in server.state if path.startswith("m/")]:
            delta = weights[name] - server.weights[name]
            m = self.beta1 * server.state[f"m/{name}"] + (1 - self.beta1) * delta
            v = self.second_moment(server.state[f"v/{name}"], delta.square())
            weights[name] = server.weights[name] + self.server_lr * m / (v.sqrt() + self.tau)
            state |= {f"m/{name}": m, f"v/{name}": v}
        return Server(weights, state)


METHOD = Method(
    "fedadam",
    About(
        summary="FedAvg, but the server applies Adam (without bias correction) to the clients' average change.",
        paper="Reddi et al., 2021",
        formula="Δ = Σ_k w_k / K - w; m ← β1·m + (1-β1)·Δ; v ← β2·v + (1-β2)·Δ²; w ← w + η·m/(√v + τ)",
        state="m, v",
        aggregation="Adam on Δ",
    ),
    LinearLearner(),
    ServerAdam(),
)
