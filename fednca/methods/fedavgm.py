"""FedAvgM (Hsu et al., 2019): the server moves by the clients' mean change with momentum and a learning rate."""

import torch
from pydantic import Field

from fednca.methods.contract import About, Method, Rule, Server, Tensors, Update
from fednca.methods.fedavg import LinearLearner


class ServerMomentum(Rule):
    """A step of SGD with momentum along the clients' average change; at a learning rate of 1 and no momentum, FedAvg.

    Buffers get no momentum, which could make a variance negative; they move to their average at most.
    """

    server_lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Learning rate η of the server; below 1 the server goes only part of the way to the average."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum β: the share of the server's last move that is added to the next one."""

    def start_server(self, weights: Tensors, clients: int) -> Tensors:
        """Return m = 0."""
        return {f"m/{name}": torch.zeros_like(weight) for name, weight in weights.items()}

    def combine(self, server: Server, updates: list[Update], shares: list[float], clients: int) -> Server:
        """Average everything, then move trainable weights by a step with momentum, and buffers towards the average."""
        lr, before = self.server_lr, server.weights
        weights = dict(super().combine(server, updates, shares, clients).weights)
        state: Tensors = {}
        for name, mean in weights.items():
            last = server.state.get(f"m/{name}")
            if last is not None:
                state[f"m/{name}"] = self.momentum * last + (mean - before[name])
                weights[name] = before[name] + lr * state[f"m/{name}"]
            elif mean.is_floating_point():
                weights[name] = torch.lerp(before[name], mean, min(lr, 1.0))
        return Server(weights, state)


METHOD = Method(
    "fedavgm",
    About(
        summary="FedAvg, but the server applies SGD with momentum to the clients' average change of the weights.",
        paper="Hsu et al., 2019",
        formula="Δ = Σ_k w_k / K - w; m ← β·m + Δ; w ← w + η·m",
        state="m",
        aggregation="SGD on Δ",
    ),
    LinearLearner(),
    ServerMomentum(),
)
