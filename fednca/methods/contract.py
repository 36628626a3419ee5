"""The contract of a federated method: a learner, a rule and a closing.

A learner says what a client learns: the head on the encoder, the local loss, how logits become probabilities. A rule
says what clients and server keep, add, correct, upload and average. A closing completes each model that is judged: it
says what clients add up, in one exchange or several, and what the server computes from the totals. Each part is a
frozen set of options. A method names its parts, and another method's learner or closing can replace its own.

Clients and server exchange only `dict[str, Tensor]`. Parts know nothing of engines: they are given all they may use.
Images are (B, 3, H, W), normalised; labels are (B, C): 1, 0, or -1 for unknown.
"""

import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fednca.base.errors import FedncaError
from fednca.base.tensors import Packed
from fednca.config.options import Options
from fednca.measures.losses import CRITERIA
from fednca.models.heads import Head

Tensors = dict[str, Tensor]
"""Tensors by name: weights, updates, sums."""


@dataclass(frozen=True)
class Server:
    """What the server holds between rounds: the global model's weights and buffers, and the rule's own tensors."""

    weights: Tensors
    state: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What one client sends to the server after its local update."""

    client: int
    weights: Tensors
    extra: Tensors
    samples: int
    steps: int


@dataclass
class Local:
    """What a client sees during one local update; `state` is its own and stays with it from round to round."""

    client: int
    round: int
    lr: float
    learner: "Learner"
    model: nn.Module
    start: Tensors  # the global weights and buffers this update began with
    received: Tensors  # what `Rule.send` added to them
    state: Tensors
    rng: torch.Generator
    steps: int = 0
    samples: int = 0  # images of the client

    def rand(self, samples: int, *shape: int) -> Tensor:
        """Draw uniform numbers (B, …) on the CPU; a loss must draw all random numbers here, as many in every step."""
        return torch.rand(samples, *shape, generator=self.rng)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensors:
        """Return the terms of the learner's loss for a model and a batch."""
        return self.learner.losses(model, images, labels, self)

    @cached_property
    def weights(self) -> Tensors:
        """The model's own trainable parameters, without buffers; penalties and corrections act on these."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def global_model(self) -> nn.Module:
        """A frozen copy of the model this update began with, in evaluation mode."""
        frozen = copy.deepcopy(self.model).eval().requires_grad_(False)
        frozen.load_state_dict(self.start)
        return frozen


class Learner(Options):
    """What a client learns; the fields of a subclass are its options."""

    own_loss: ClassVar[bool] = False  # its loss is fixed, and `criterion` cannot replace it
    clip_norm: ClassVar[float | None] = None  # largest gradient norm, if the config sets none

    criterion: Literal["bce", "balanced", "asl"] | None = None
    """Loss in place of the learner's own BCE: plain BCE, class-balanced BCE, or the asymmetric loss."""

    @property
    def betas(self) -> tuple[float, float] | None:
        """AdamW's betas, if the config sets none."""
        return None

    @property
    def note(self) -> str:
        """A remark to show with every result of this learner, or nothing."""
        return ""

    def decided(self, pretrained: bool) -> Self:
        """Return the learner with its open options set; refuse options that do not fit together."""
        return self

    def sketch(self) -> Self:
        """Return a learner whose head has the same shapes but needs no file; a saved model brings its own constants."""
        return self

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the head for an encoder's map of `dim` channels: (B, dim, H, W) → `Output`."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return BCE, or the loss that replaces it: logits (B, C), labels (B, C) → ()."""
        return CRITERIA[self.criterion or "bce"](logits, labels)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return the weighted terms of the local loss on a batch; training minimises their sum."""
        return {"bce": self.loss(model(images).logits, labels)}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Turn logits (B, C) into probabilities (B, C)."""
        return logits.sigmoid()


class Rule(Options):
    """How clients and server work together; this base class averages the updates.

    An engine must know two things before it trains, so they are class variables: `adds_up` if `finish` needs sums over
    the client's images, and `copies`, the number of tensors of each trainable weight's size that `finish` uploads
    (differential privacy allows none).
    """

    adds_up: ClassVar[bool] = False
    copies: ClassVar[int] = 0
    centralized: ClassVar[bool] = False  # one client has all images and keeps its optimiser's state

    # -- at the client -------------------------------------------------------------------------------------------------

    def start_client(self, weights: Tensors) -> Tensors:
        """Return a client's state before its first round; `weights` are the trainable ones."""
        return {}

    def penalties(self, local: Local) -> Tensors:
        """Return further terms of the local loss, which depend on the weights only."""
        return {}

    def correct(self, local: Local) -> None:
        """Change the weights in place after an optimiser step."""

    def sums(self, local: Local, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of the sums over the client's images that `finish` receives.

        It may read the local model, weights, `state`, `start` and `received`, but not the client, round, steps or
        samples: on a GPU, what it did for the first client is replayed for all others.
        """
        return {}

    def finish(self, local: Local, sums: Tensors) -> Tensors:
        """Update `local.state`, and return what the client uploads besides its weights."""
        return {}

    # -- at the server -------------------------------------------------------------------------------------------------

    def start_server(self, weights: Tensors, clients: int) -> Tensors:
        """Return the server's own tensors before the first round; `weights` are the trainable ones."""
        return {}

    def send(self, server: Server) -> Tensors:
        """Return what the server sends besides the weights."""
        return {}

    def combine(self, server: Server, updates: list[Update], shares: list[float], clients: int) -> Server:
        """Return the next server from the round's updates (ordered by client) and their shares (which add up to 1).

        clients: the number of clients in the federation, whether or not they took part.
        """
        return Server(average([update.weights for update in updates], shares), server.state)


Exchanges = Generator[Tensors, Tensors, Server]
"""Yields what to send to the clients, receives the total of their sums, and returns the final server."""


class Closing(Options):
    """What completes a model from all clients' images before it is judged; training goes on without it."""

    needs: ClassVar[type[Learner]] = Learner  # the learners it works with

    def sums(self, model: nn.Module, images: Tensor, labels: Tensor, asked: Tensors) -> Tensors:
        """Return a batch's part of a client's sums; `model` holds the trained weights, `asked` what the server sent."""
        raise NotImplementedError

    def close(self, server: Server) -> Exchanges:
        """Yield what each exchange sends, receive the total of all clients' sums, and return the final server."""
        raise NotImplementedError


@dataclass(frozen=True)
class About:
    """What a method changes compared with FedAvg, for tables and documentation."""

    summary: str
    paper: str
    formula: str
    head: str = "linear"
    objective: str = "BCE"
    state: str = "none"
    aggregation: str = "average"


@dataclass(frozen=True)
class Method:
    """A learner, a rule and perhaps a closing, under the name of the paper that combines them."""

    name: str
    about: About
    learner: Learner
    rule: Rule = field(default_factory=Rule)
    closing: Closing | None = None

    def __post_init__(self) -> None:
        """Refuse a part that is none, and a closing that does not work with the learner."""
        for name, kind in (("about", About), ("learner", Learner), ("rule", Rule), ("closing", Closing)):
            part = getattr(self, name)
            if not isinstance(part, kind) and (part is not None or name != "closing"):
                found = part.__name__ if isinstance(part, type) else repr(part)
                raise FedncaError(f"the {name} of method '{self.name}' is {found}, not an instance of {kind.__name__}")
        if self.closing is not None and not isinstance(self.learner, self.closing.needs):
            raise FedncaError(
                f"the closing {type(self.closing).__name__} of method '{self.name}' needs a "
                f"{self.closing.needs.__name__}, not a {type(self.learner).__name__}; choose another of the two"
            )

    @property
    def parts(self) -> dict[str, Options]:
        """Learner, rule and closing by name."""
        parts = {"learner": self.learner, "rule": self.rule, "closing": self.closing}
        return {name: part for name, part in parts.items() if part is not None}


def options_of(part: Options | type[Options]) -> list[str]:
    """Return the names of a part's own options, without `criterion`, which has a setting of its own."""
    fields = (part if isinstance(part, type) else type(part)).model_fields
    return [name for name in fields if name != "criterion"]


class _WithGradients(torch.autograd.Function):
    """Passes a value on; in the backward pass, scales the gradients that came with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *weights: Tensor) -> Tensor:  # noqa: ANN401
        ctx.gradients = gradients
        return value

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, None, *torch._foreach_mul(ctx.gradients, by)


def with_gradients(value: Tensor, gradients: Sequence[Tensor], weights: Tensors) -> Tensor:
    """Return a value () with known gradients with respect to the weights, which autograd need not compute again."""
    found: Tensor = _WithGradients.apply(value, gradients, *weights.values())
    return found


def average(weights: list[Tensors], shares: list[float]) -> Tensors:
    """Average clients' tensors; sums are in float64, so that equal inputs stay equal; of counters, take the maximum.

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
