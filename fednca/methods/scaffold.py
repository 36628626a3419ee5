"""SCAFFOLD (Karimireddy et al., 2020), option II: control variates remove the clients' drift from their updates.

A control is a mean update per step, divided by the learning rate. AdamW would rescale it if it were added to the
gradient, so it is applied after the optimiser's step. With plain SGD both give the paper's rule.
"""

from typing import ClassVar

import torch

from fednca.methods.contract import About, Local, Method, Rule, Server, Tensors, Update, average
from fednca.methods.fedavg import LinearLearner


class ControlVariates(Rule):
    """Each client step is corrected by the difference between the server's and the client's own mean update."""

    copies: ClassVar[int] = 1

    def start_client(self, weights: Tensors) -> Tensors:
        """Return the control c_k = 0."""
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def start_server(self, weights: Tensors, clients: int) -> Tensors:
        """Return the control c = 0."""
        return self.start_client(weights)

    def send(self, server: Server) -> Tensors:
        """Return c."""
        return server.state

    def correct(self, local: Local) -> None:
        """Step w ← w - lr·(c - c_k)."""
        server, own = ([controls[name] for name in local.weights] for controls in (local.received, local.state))
        torch._foreach_sub_(list(local.weights.values()), torch._foreach_sub(server, own), alpha=local.lr)

    def finish(self, local: Local, sums: Tensors) -> Tensors:
        """Set the next c_k and return its change c_k⁺ - c_k = (w_global - w_k)/(steps·lr) - c."""
        change = {
            name: (local.start[name] - weight.detach()) / (local.steps * local.lr) - local.received[name]
            for name, weight in local.weights.items()
        }
        local.state = {name: control + change[name] for name, control in local.state.items()}
        return change

    def combine(self, server: Server, updates: list[Update], shares: list[float], clients: int) -> Server:
        """Average the weights, and add to c the sum of the round's changes over the number of all clients."""
        change = average([update.extra for update in updates], [1 / clients] * len(updates))
        control = {name: c + change[name] for name, c in server.state.items()}
        return Server(super().combine(server, updates, shares, clients).weights, control)


METHOD = Method(
    "scaffold",
    About(
        summary="FedAvg, but clients correct each step by the difference of the server's mean update and their own.",
        paper="Karimireddy et al., 2020",
        formula="w ← w - lr·(g + c - c_k); c_k⁺ = c_k - c + (w_global - w_k)/(steps·lr); c ← c + Σ_k (c_k⁺ - c_k) / K",
        state="c, c_k",
    ),
    LinearLearner(),
    ControlVariates(),
)
