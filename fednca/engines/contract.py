"""The contract of an engine: it carries out what the loop of rounds asks of clients.

An engine for another machine, a cluster or a network subclasses `Engine`. Every answer says who was left out, and why.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fednca.methods.contract import Server, Tensors, Update


@dataclass(frozen=True)
class Trained:
    """A client's update, what the federation keeps for the client, and its mean losses by term."""

    update: Update
    state: Tensors
    losses: dict[str, float]
    note: str = ""  # what must be said of it


@dataclass(frozen=True)
class LeftOut:
    """A client whose update is missing, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class Totals:
    """What clients' sums add up to; None where too few sent theirs."""

    sums: Tensors | None
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """How good a model is: metrics as a round's record holds them, and the thresholds that were chosen.

    `thresholds` (C,) is None where too few clients judged the model.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    thresholds: Tensor | None = None
    left_out: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Trains clients, adds up what they know, and has models judged."""

    names: Sequence[str]  # of the clients, by number
    note: str  # how it does so, in a sentence; empty where there is nothing to say
    keeps_states: bool = False  # clients keep their own states, so that each round must be on disk before the next

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained | LeftOut]:
        """Yield, in any order, what each client's local update in round `number` came to."""

    def sums(self, number: int, server: Server, asked: Tensors) -> Totals:
        """Return what all clients' sums for one exchange of the method's closing add up to."""

    def judge(self, number: int, server: Server) -> Judgement:
        """Judge the server's model on validation and test images."""

    def ended(self) -> str:
        """Return why no further round may begin, or nothing."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return what the record of a round says of the engine's own side, a spent privacy budget say."""
        return {}

    def close(self) -> None:
        """Give back what the engine holds outside of this process's memory; most hold nothing."""
        return
