"""A slot: a fixed place in device memory where one client after another trains, so that a CUDA graph can replay it.

A graph reads and writes the addresses it was captured with (see `graphs`). So whatever a step touches is made once and
never moves: what all slots share is in `Common`, what belongs to the client that trains is in a `Slot`. The next client
is copied in.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fednca.base.tensors import Layout, Packed
from fednca.config import AugmentConfig, TrainConfig
from fednca.engines.augment import augment
from fednca.engines.images import ImageStore
from fednca.engines.optimizer import VectorOptimizer, added, bind
from fednca.engines.scoring import autocast, score
from fednca.kernels import FusedStem, accelerate, available, watch
from fednca.methods.contract import Local, Method, Server, Tensors

# Autocast casts these layers' weights to bf16 whenever they are used, and uses them for nothing else. So they can be
# given bf16 weights that were cast before, all at once.
CAST = {nn.Conv1d, nn.Conv2d, FusedStem, nn.Linear, NonDynamicallyQuantizableLinear, nn.MultiheadAttention}


@dataclass
class SlotLocal(Local):
    """A client's view of its slot; what its losses draw was drawn before the update began."""

    drawn: Iterator[Tensor] = field(default_factory=lambda: iter(()))

    def rand(self, samples: int, *shape: int) -> Tensor:
        """Return the step's next numbers, which were drawn on the CPU before the first step."""
        return next(self.drawn)


@dataclass
class Recorder(Local):
    """Notes what a step draws, so that it can be drawn in advance."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def rand(self, samples: int, *shape: int) -> Tensor:
        """Draw, and note the shape of one sample's numbers."""
        self.shapes.append(shape)
        return super().rand(samples, *shape)


class Common:
    """What all slots share: the round's global weights, what the server sent with them, and the shape of a step."""

    def __init__(
        self, method: Method, model: nn.Module, config: TrainConfig, store: ImageStore, room: int, clients: int
    ) -> None:
        """Take what stays the same; `room` is the most images that a client sees in a round."""
        self.method, self.model, self.config, self.store, self.room = method, model, config, store, room
        self.device = store.mean.device
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.layout = Layout.of(tensors, first=self.trainable)
        self.start = Packed.zeros(self.layout, self.device)
        self.start.load(tensors)
        self.scratch = self.start.clone()
        bind(model, self.scratch)
        started = {name: self.start[name] for name in self.trainable}
        server = Server(self.start, method.rule.start_server(started, clients))
        self.received = {name: tensor.clone() for name, tensor in method.rule.send(server).items()}
        self.state = method.rule.start_client(started)

    def try_out(self, images: Tensor, labels: Tensor) -> None:
        """Take the gradients of one step, to learn what a step consists of and to fill every cache a model may have.

        It learns the names of the loss's terms, the shapes of what is drawn, what our kernels can do, and by how much a
        step moves integer buffers (BatchNorm's counters of batches).
        """
        self.scratch.load(self.start)
        local = self.recorder()
        before = {name: tensor.clone() for name, tensor in self.scratch.items() if not tensor.is_floating_point()}
        self.model.train()
        terms: Tensors = {}

        def forward() -> None:
            with autocast(self.device, self.config):
                terms.update(self.method.learner.losses(self.model, images, labels, local))

        self.fusible = watch(self.model, forward)
        penalties = self.method.rule.penalties(local)
        self.terms, self.drawn = [*terms, *penalties], local.shapes
        torch.autograd.grad(added(terms | penalties), list(local.weights.values()), allow_unused=True)
        self.counted = {name: self.scratch[name] - old for name, old in before.items()}
        self.model.eval()
        with torch.no_grad():
            score(self.method, self.model, images, self.config)
        self.frozen = Frozen(self, self.start)

    def recorder(self) -> Recorder:
        """Return a client without number or round, whose tensors stay where they are."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        given = (self.config.lr, self.method.learner, self.model, self.start, self.received, state, torch.Generator())
        return Recorder(0, 0, *given)

    def begin(self, server: Server) -> None:
        """Copy what a round begins with to where the graphs read it."""
        self.start.load(server.weights)
        self.frozen.renew()
        copy_all(self.method.rule.send(server), self.received)

    def copy_model(self, values: Packed) -> nn.Module:
        """Return a model of its own with these tensors, in bf16 one that uses our kernels."""
        model = bind(copy.deepcopy(self.model), values)
        return accelerate(model, self.fusible) if self.config.precision == "bf16" and available() else model


class Frozen:
    """A model that scores images and is not trained, with the tensors it is given.

    In bf16 its weights are cast once after they have changed; autocast would cast them again for every batch.
    """

    def __init__(self, common: Common, values: Packed) -> None:
        """Build the model of these tensors."""
        self.values = values
        self.model = common.copy_model(values).eval().requires_grad_(False)
        names = [name for name, _ in self.model.named_parameters()]
        self.shadow = cast_at_once(self.model, values, names) if common.config.precision == "bf16" else None

    def renew(self) -> None:
        """Follow the tensors, which have changed."""
        if self.shadow is not None:
            self.shadow.load(self.values)


@dataclass(frozen=True)
class Feed:
    """What one client sees in one round: all its batches, one behind the other in the order of its steps."""

    rows: Tensor  # of the store, (n·epochs,)
    labels: Tensor  # (n·epochs, C)
    draws: list[Tensor]  # what the losses draw, (n·epochs, …) each
    changes: list[Tensor]  # by what images are augmented, (n·epochs, 8), where they are
    sizes: list[int]  # of the batches


class Slot:
    """Weights, gradients, optimiser and data of the client that trains here."""

    def __init__(self, common: Common, classes: int) -> None:
        """Make room for a client's update."""
        self.common, device, config = common, common.device, common.config
        self.values = common.start.clone()
        self.dtype = common.store.mean.dtype
        self.optimizer = VectorOptimizer(self.values, common.trainable, config, common.method)
        self.model = common.copy_model(self.values).train()
        self.increments = self._count_at_once()
        # Masters are the weights that the optimiser moves, in float32. Leaves are what the forward pass uses and what
        # gradients are taken by: the same tensors or, in bf16, copies for the layers that autocast would cast anyway.
        self.masters = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.shadow = None
        if config.precision == "bf16":
            self.shadow = cast_at_once(self.model, self.values, common.trainable).vectors[torch.bfloat16]
        self.leaves = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.renew_shadow()

        self.state = {name: tensor.clone() for name, tensor in common.state.items()}
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.offsets = torch.arange(common.room, device=device)
        augmented = config.augment != AugmentConfig()
        self.feed = Feed(
            rows=torch.zeros(common.room, dtype=torch.int64, device=device),
            labels=torch.zeros(common.room, classes, dtype=self.dtype, device=device),
            draws=[torch.zeros(common.room, *shape, device=device) for shape in common.drawn],
            changes=[torch.zeros(common.room, 8, dtype=self.dtype, device=device)] if augmented else [],
            sizes=[],
        )
        self.totals = torch.zeros(len(common.terms), dtype=self.dtype, device=device)
        self.local = SlotLocal(
            0,
            0,
            config.lr,
            common.method.learner,
            self.model,
            common.start,
            common.received,
            self.state,
            torch.Generator(),
        )
        vars(self.local).update(weights=self.masters, global_model=common.frozen.model)  # Local would make copies

    def begin(self, feed: Feed, state: Tensors) -> None:
        """Copy a client in, and set everything to the beginning of its round.

        A client with fewer images than others leaves the end of the fixed tensors as it was; no step gets there.
        """
        self.values.load(self.common.start)
        self.renew_shadow()
        self.optimizer.reset()
        torch._foreach_zero_([self.cursor, self.totals])
        copy_all(state or self.common.state, self.state)
        mine = [self.feed.rows, self.feed.labels, *self.feed.draws, *self.feed.changes]
        theirs = [feed.rows, feed.labels, *feed.draws, *feed.changes]
        for here, there in zip(mine, theirs, strict=True):
            here[: len(there)].copy_(there)

    def step(self, size: int) -> None:
        """Take the next step, on a batch of this size; every address it reads and writes is fixed."""
        common, config, method, local = self.common, self.common.config, self.common.method, self.local
        at = self.cursor + self.offsets[:size]  # counted on the GPU: a replay cannot be told which batch is next
        change = None
        if self.feed.changes:
            change = partial(augment, draws=self.feed.changes[0][at], config=config.augment)
        images, labels = common.store.gather(self.feed.rows[at], change), self.feed.labels[at]
        local.drawn = iter([numbers[at] for numbers in self.feed.draws])
        with autocast(common.device, config):
            terms = method.learner.losses(self.model, images, labels, local)
        penalties = method.rule.penalties(local)
        self._move(terms, penalties)
        self.totals.add_(torch.stack([term.detach() for term in (terms | penalties).values()]), alpha=size)
        if self.increments is not None:
            self.values.vectors[torch.int64].add_(self.increments)
        self.cursor.add_(size)

    def renew_shadow(self) -> None:
        """Cast the weights for the next forward pass, all with one kernel."""
        if self.shadow is not None:
            self.shadow.copy_(self.optimizer.vector.detach())

    def _move(self, terms: Tensors, penalties: Tensors) -> None:
        """Move the weights along the gradients of the losses, and renew their bf16 copies."""
        self.optimizer.take(torch.autograd.grad(added(terms), list(self.leaves.values()), allow_unused=True))
        if penalties:  # they act on weights as they were before they were cast
            own = torch.autograd.grad(added(penalties), list(self.masters.values()), allow_unused=True)
            self.optimizer.add(own)
        self.optimizer.step()
        with torch.no_grad():
            self.common.method.rule.correct(self.local)
        self.renew_shadow()

    def _count_at_once(self) -> Tensor | None:
        """Take the counting of batches out of BatchNorm, and return what one addition adds to all counters.

        Each BatchNorm would launch a kernel to add 1 to a number of its own.
        """
        if torch.int64 not in self.values.vectors:
            return None
        increments = Packed(self.common.layout, {d: torch.zeros_like(v) for d, v in self.values.vectors.items()})
        for path, module in self.model.named_modules():
            name = f"{path}.num_batches_tracked"
            if (
                isinstance(module, nn.modules.batchnorm._BatchNorm)
                and module.momentum is not None
                and name in increments
            ):
                increments[name].copy_(self.common.counted[name])
                module.num_batches_tracked = None
        return increments.vectors[torch.int64]


def cast_at_once(model: nn.Module, values: Packed, names: list[str]) -> Packed:
    """Give the layers that autocast casts bf16 weights of their own, and return all bf16 weights, to be renewed."""
    shadow = Packed.zeros(Layout.of({name: values[name].bfloat16() for name in names}), values[names[0]].device)
    for path, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            name = f"{path}.{leaf}"
            if type(module) in CAST and weight is not None and name in shadow:
                module._parameters[leaf] = nn.Parameter(shadow[name], weight.requires_grad)
    return shadow


def copy_all(tensors: Tensors, places: Tensors) -> None:
    """Copy tensors to the places of the same names."""
    if places:
        torch._foreach_copy_(list(places.values()), [tensors[name] for name in places])
