"""The contract of a federated method.

A method is two halves. As a *learner* it says what a client learns: the head on the backbone, the local loss and how
outputs become probabilities. As a *federation rule* it says how clients and server co-operate: penalties on the
weights, corrections after each step, extra uploads, aggregation, and a closing exchange. Every default below is
FedAvg's, so a method overrides only what it changes. `learner` lets one method's rule train another one's learner.

What travels is always a flat `dict[str, Tensor]`. Methods know no engine: everything they may look at is passed in;
images come as (B, 3, H, W), normalised, and labels as (B, C), with -1 for unknown.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fednca.losses import bce
from fednca.options import Options
from fednca.packed import Packed

Tensors = dict[str, Tensor]
Criterion = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), labels (B, C) → ()


@dataclass(frozen=True)
class About:
    """What a method changes against FedAvg, for tables and documentation."""

    paper: str
    formula: str
    head: str = "linear"
    objective: str = "BCE"
    state: str = "none"
    aggregation: str = "average"


@dataclass(frozen=True)
class Task:
    """What a head is built for."""

    classes: tuple[str, ...]
    dim: int  # channels of the backbone's map


@dataclass(frozen=True)
class Server:
    """What the server holds between rounds: the global model's weights and buffers, and the method's own tensors."""

    weights: Tensors
    state: Tensors = field(default_factory=dict)


@dataclass
class Local:
    """What a client sees during one local update; `state` is its own and stays with it from round to round."""

    client: int
    round: int
    lr: float
    model: nn.Module
    start: Tensors  # the global weights and buffers this update began with
    received: Tensors  # what `Method.send` added to them
    state: Tensors
    rng: torch.Generator
    steps: int = 0
    samples: int = 0  # images of the client

    def rand(self, samples: int, *shape: int) -> Tensor:
        """Draw uniform numbers (B, …) for a batch, on the CPU; whatever a loss draws, it draws here, in every step."""
        return torch.rand(samples, *shape, generator=self.rng)

    @cached_property
    def weights(self) -> Tensors:
        """The trainable parameters, live: what penalties and corrections act on (never buffers)."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def global_model(self) -> nn.Module:
        """A frozen copy of the model this update began with, in evaluation mode."""
        frozen = copy.deepcopy(self.model).eval().requires_grad_(False)
        frozen.load_state_dict(self.start)
        return frozen


@dataclass(frozen=True)
class Update:
    """What one client sends to the server after its local update."""

    client: int
    weights: Tensors
    extra: Tensors
    samples: int
    steps: int


class Method:
    """One federated algorithm; see the module's text for the two halves."""

    Hyper: ClassVar[type[Options]] = Options
    about: ClassVar[About]
    extra_copies: ClassVar[int] = 0  # how many tensors of each trainable weight's size `finish` uploads
    centralized: ClassVar[bool] = False  # one client with all images that keeps its optimiser state
    closes: ClassVar[bool] = False  # has a closing exchange

    clients: int = 1  # of the federation, set by whoever creates the method
    kept_texts: Path | None = None  # a run's own text table, read in place of the configured one where it is there
    note: str = ""  # what must be said wherever the learner's results are shown

    betas: tuple[float, float] | None = None  # AdamW's, where the config leaves them open
    clip_norm: float | None = None  # likewise
    criterion: Criterion | None = None  # takes the place of the learner's own BCE

    def __init__(
        self, hyper: Options | None = None, *, pretrained: bool = False, learner: "Method | None" = None
    ) -> None:
        """Take the hyper-parameters, whether the backbone starts from pretrained weights, and another's learner."""
        self.hyper = hyper if hyper is not None else self.Hyper()
        self.pretrained = pretrained
        self.learner: Method = learner or self
        self.settle()

    def settle(self) -> None:
        """Decide what the hyper-parameters leave open, and refuse what does not go together."""

    @classmethod
    def changes_rule(cls) -> bool:
        """Tell whether the federation rule is another one than plain averaging."""
        hooks = ("start_client", "penalties", "correct", "finish", "start_server", "send", "aggregate", "close_sums")
        return cls.centralized or any(getattr(cls, hook) is not getattr(Method, hook) for hook in hooks)

    @classmethod
    def sketch(cls) -> Self:
        """Create the method with its defaults and nothing that must be fetched, to count and describe it."""
        return cls()

    def with_hyper(self, **changes: object) -> None:
        """Set hyper-parameters that were left to the method to decide, so that a run's config tells them."""
        self.hyper = self.hyper.model_copy(update=changes)

    # -- learner: what a client learns ---------------------------------------------------------------------------------

    def head(self, task: Task) -> nn.Module:
        """Build the head: feature map (B, d, H, W) → `Output`."""
        raise NotImplementedError

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return the weighted terms of the local loss on a batch; their sum is minimised."""
        criterion = self.criterion or bce
        return {"bce": criterion(model(images).logits, labels)}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Turn logits (B, C) into probabilities (B, C)."""
        return logits.sigmoid()

    # -- federation rule, at the client --------------------------------------------------------------------------------

    def start_client(self, weights: Tensors) -> Tensors:
        """Return a client's state before its first round; `weights` are the trainable ones."""
        return {}

    def penalties(self, local: Local) -> Tensors:
        """Return further terms of the local loss that depend on the weights alone."""
        return {}

    def correct(self, local: Local) -> None:
        """Change the weights in place after an optimiser step."""

    def finish_sums(self, local: Local, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of what `finish` is given: sums over the client's images; by default there are none.

        It may read the model, the weights, the client's state and what was received or begun with; not who the client
        is, nor the round, nor how many steps and images there were: a GPU replays what it did for the first one.
        """
        return {}

    def finish(self, local: Local, sums: Tensors) -> Tensors:
        """Return what a client uploads beside its weights, and update `local.state`."""
        return {}

    # -- federation rule, at the server --------------------------------------------------------------------------------

    def start_server(self, weights: Tensors) -> Tensors:
        """Return the server's own tensors before the first round; `weights` are the trainable ones."""
        return {}

    def send(self, server: Server) -> Tensors:
        """Return what the server sends beside the weights."""
        return {}

    def aggregate(self, server: Server, updates: list[Update], shares: list[float]) -> Server:
        """Make the next server from the round's updates (in order of client) and their shares (which add up to 1)."""
        return Server(average([update.weights for update in updates], shares), server.state)

    # -- closing exchange, for methods with `closes` -------------------------------------------------------------------

    def close_sums(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of a client's sums for the closing exchange; `model` holds the trained weights."""
        raise NotImplementedError

    def close_server(self, server: Server, sums: list[Tensors]) -> Server:
        """Make the final server from the trained weights and all clients' sums."""
        raise NotImplementedError


class _WithGradients(torch.autograd.Function):
    """Passes a value on, and multiplies the gradients that were given with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *weights: Tensor) -> Tensor:  # noqa: ANN401
        ctx.gradients = gradients
        return value

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, None, *torch._foreach_mul(ctx.gradients, by)


def with_gradients(value: Tensor, gradients: Sequence[Tensor], weights: Tensors) -> Tensor:
    """Return a value () whose gradients by the weights are known, so that they need not be derived from it."""
    found: Tensor = _WithGradients.apply(value, gradients, *weights.values())
    return found


def average(weights: list[Tensors], shares: list[float]) -> Tensors:
    """Average clients' tensors; sums run in float64 so that equal inputs stay equal, and counters take the maximum.

    >>> average([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}], [0.5, 0.5])
    {'w': tensor([2.])}
    """
    first = weights[0]
    if isinstance(first, Packed):
        packed = [each for each in weights if isinstance(each, Packed) and each.follows(first.layout)]
        if len(packed) == len(weights):
            stacks = {dtype: [each.vectors[dtype] for each in packed] for dtype in first.vectors}
            return Packed(first.layout, {dtype: _average_one(stack, shares) for dtype, stack in stacks.items()})
    return {name: _average_one([each[name] for each in weights], shares) for name in first}


def _average_one(tensors: list[Tensor], shares: list[float]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():
        return torch.stack(tensors).amax(0)
    total = torch.zeros_like(first, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor, alpha=share)
    return total.to(first.dtype)
