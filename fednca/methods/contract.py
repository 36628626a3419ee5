"""The contract of a federated method: a learner, a rule and a closing.

A learner says what a client learns: the head on the encoder, the local loss, how logits become probabilities. A rule
says what clients and server keep, add, correct, upload and average. A closing says what clients add up once training
is over, in one exchange or several, and what the server makes of the sums. Each part is a frozen set of options; a
method names three of them, and any part may be replaced by another method's.

What travels is always a flat `dict[str, Tensor]`. Parts know no engine: everything they may look at is passed in.
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
        """Draw uniform numbers (B, …) for a batch, on the CPU; whatever a loss draws, it draws here, in every step."""
        return torch.rand(samples, *shape, generator=self.rng)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensors:
        """Return the terms of the learner's loss of a model on a batch."""
        return self.learner.losses(model, images, labels, self)

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


class Learner(Options):
    """What a client learns; the fields of a subclass are its options."""

    own_loss: ClassVar[bool] = False  # its loss is fixed, and `criterion` cannot replace it
    clip_norm: ClassVar[float | None] = None  # largest gradient norm where the config leaves it open

    criterion: Literal["bce", "balanced", "asl"] | None = None
    """Take this in place of BCE: BCE itself, class-balanced BCE, or the asymmetric loss."""

    @property
    def betas(self) -> tuple[float, float] | None:
        """AdamW's betas where the config leaves them open."""
        return None

    @property
    def note(self) -> str:
        """What must be said wherever results of this learner are shown."""
        return ""

    def decided(self, pretrained: bool) -> Self:
        """Return the learner with every option that was left open decided, and refuse what does not go together."""
        return self

    def sketch(self) -> Self:
        """Return a learner whose head has the same shapes and needs no file; a saved model fills in its constants."""
        return self

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the head for an encoder's map of `dim` channels: (B, dim, H, W) → `Output`."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return BCE, or what replaces it: logits (B, C), labels (B, C) → ()."""
        return CRITERIA[self.criterion or "bce"](logits, labels)

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return the weighted terms of the local loss on a batch; their sum is minimised."""
        return {"bce": self.loss(model(images).logits, labels)}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Turn logits (B, C) into probabilities (B, C)."""
        return logits.sigmoid()


class Rule(Options):
    """How clients and server work together; as it stands, plain averaging.

    Two things an engine must know before it trains, so they are data: `adds_up` if `finish` needs sums over the client's
    images, and `copies`, how many tensors of each trainable weight's size `finish` uploads.
    """

    adds_up: ClassVar[bool] = False
    copies: ClassVar[int] = 0
    centralized: ClassVar[bool] = False  # one client with all images that keeps its optimiser's state

    # -- at the client -------------------------------------------------------------------------------------------------

    def start_client(self, weights: Tensors) -> Tensors:
        """Return a client's state before its first round; `weights` are the trainable ones."""
        return {}

    def penalties(self, local: Local) -> Tensors:
        """Return further terms of the local loss that depend on the weights alone."""
        return {}

    def correct(self, local: Local) -> None:
        """Change the weights in place after an optimiser step."""

    def sums(self, local: Local, images: Tensor, labels: Tensor) -> Tensors:
        """Return a batch's part of what `finish` is given: sums over the client's images.

        It may read the model, the weights, the client's state and what was received or begun with; not who the client
        is, nor the round, nor how many steps and images there were: a GPU replays what it did for the first client.
        """
        return {}

    def finish(self, local: Local, sums: Tensors) -> Tensors:
        """Return what a client uploads beside its weights, and update `local.state`."""
        return {}

    # -- at the server -------------------------------------------------------------------------------------------------

    def start_server(self, weights: Tensors, clients: int) -> Tensors:
        """Return the server's own tensors before the first round; `weights` are the trainable ones."""
        return {}

    def send(self, server: Server) -> Tensors:
        """Return what the server sends beside the weights."""
        return {}

    def combine(self, server: Server, updates: list[Update], shares: list[float], clients: int) -> Server:
        """Make the next server from the round's updates (in order of client) and their shares (which add up to 1).

        clients: how many the federation has, whoever took part.
        """
        return Server(average([update.weights for update in updates], shares), server.state)


Exchanges = Generator[Tensors, Tensors, Server]  # yields what clients are sent, receives the total of their sums


class Closing(Options):
    """What is computed from all clients' images once the weights are trained."""

    needs: ClassVar[type[Learner]] = Learner  # whose models it can close

    def sums(self, model: nn.Module, images: Tensor, labels: Tensor, asked: Tensors) -> Tensors:
        """Return a batch's part of a client's sums; `model` holds the trained weights, `asked` what the server sent."""
        raise NotImplementedError

    def close(self, server: Server) -> Exchanges:
        """Yield what each exchange sends, take the total of all clients' sums, and return the final server."""
        raise NotImplementedError


@dataclass(frozen=True)
class About:
    """What a method changes against FedAvg, for tables and documentation."""

    summary: str
    paper: str
    formula: str
    head: str = "linear"
    objective: str = "BCE"
    state: str = "none"
    aggregation: str = "average"


@dataclass(frozen=True)
class Method:
    """A learner, a rule and perhaps a closing, under the name of the paper that brings them together."""

    name: str
    about: About
    learner: Learner
    rule: Rule = field(default_factory=Rule)
    closing: Closing | None = None

    def __post_init__(self) -> None:
        """Refuse a closing that cannot close the learner's models."""
        if self.closing is not None and not isinstance(self.learner, self.closing.needs):
            raise FedncaError(
                f"the closing of '{self.name}' replaces the classifier of its own learner, and another learner has "
                "none such; leave the learner or the closing out (`--closing none`)"
            )

    @property
    def parts(self) -> dict[str, Options]:
        """Learner, rule and closing by name."""
        parts = {"learner": self.learner, "rule": self.rule, "closing": self.closing}
        return {name: part for name, part in parts.items() if part is not None}


def options_of(part: Options | type[Options]) -> list[str]:
    """Return the names of a part's own options; `criterion`, which every learner has, is set beside them."""
    fields = (part if isinstance(part, type) else type(part)).model_fields
    return [name for name in fields if name != "criterion"]


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
