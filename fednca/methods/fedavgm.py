"""FedAvgM (Hsu et al., 2019): the server moves by the clients' mean change with momentum and a learning rate."""

import torch
from pydantic import Field

from fednca.methods.base import About, Server, Tensors, Update
from fednca.methods.fedavg import FedAvg, FedAvgHyper


class FedAvgMHyper(FedAvgHyper):
    """The choices of a server with momentum; a learning rate of 1 without momentum is FedAvg."""

    server_lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Learning rate η of the server; below 1 the server goes only part of the way to the average."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum β: the share of the server's last move that is added to the next one."""


class FedAvgM(FedAvg):
    """FedAvg, but the server applies SGD with momentum to the clients' average change of the weights.

    Buffers get no momentum, which could make a variance negative; they move to their average at most.
    """

    Hyper = FedAvgMHyper
    about = About(
        paper="Hsu et al., 2019",
        formula="Δ = Σ_k w_k / K - w; m ← β·m + Δ; w ← w + η·m",
        state="m",
        aggregation="SGD on Δ",
    )
    hyper: FedAvgMHyper

    def start_server(self, weights: Tensors) -> Tensors:
        """Return m = 0."""
        return {f"m/{name}": torch.zeros_like(weight) for name, weight in weights.items()}

    def aggregate(self, server: Server, updates: list[Update], shares: list[float]) -> Server:
        """Average everything, and go along with what momentum and learning rate say."""
        lr, before = self.hyper.server_lr, server.weights
        weights = dict(super().aggregate(server, updates, shares).weights)
        state: Tensors = {}
        for name, mean in weights.items():
            last = server.state.get(f"m/{name}")
            if last is not None:
                state[f"m/{name}"] = self.hyper.momentum * last + (mean - before[name])
                weights[name] = before[name] + lr * state[f"m/{name}"]
            elif mean.is_floating_point():
                weights[name] = torch.lerp(before[name], mean, min(lr, 1.0))
        return Server(weights, state)


METHOD = FedAvgM
