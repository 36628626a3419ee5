"""The contract of an engine, which trains clients, adds up their sums and judges models for the loop of rounds.

To run on another machine, a cluster or a network, subclass `Engine`. Every answer says who was left out, and why.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fednca.methods.contract import Server, Tensors, Update


@dataclass(frozen=True)
class Trained:
    """A client's update, the state that is kept for the client, and its mean losses by term."""

    update: Update
    state: Tensors
    losses: dict[str, float]
    note: str = ""  # a remark for the round's record


@dataclass(frozen=True)
class LeftOut:
    """A client whose update is missing, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class Totals:
    """The total of all clients' sums, or None if too few clients sent theirs."""

    sums: Tensors | None
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """How good a model is: the metrics for the round's record, and the chosen thresholds.

    `thresholds` (C,) is None if too few clients judged the model.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    thresholds: Tensor | None = None
    left_out: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Trains clients, adds up their sums, and judges models."""

    names: Sequence[str]  # the clients' names, by number
    note: str  # one sentence for the user on how it works, or nothing
    keeps_states: bool = False  # clients keep their own states, so each round must be on disk before the next begins

    @abstractmethod
    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained | LeftOut]:
        """Train these clients in round `number`, and yield each one's result in any order."""

    @abstractmethod
    def sums(self, number: int, server: Server, asked: Tensors) -> Totals:
        """Return the total of all clients' sums for one exchange of the method's closing."""

    @abstractmethod
    def judge(self, number: int, server: Server) -> Judgement:
        """Judge the server's model on validation and test images."""

    def ended(self) -> str:
        """Return the reason why no further round may begin, or nothing."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return the engine's own entries for a round's record, for example the privacy budget spent."""
        return {}

    def close(self) -> None:
        """Release what the engine holds outside this process's memory; most engines hold nothing."""
        return
