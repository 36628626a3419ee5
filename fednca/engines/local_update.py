"""The one definition of a client's local update: an ordinary training loop, on any device."""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from fednca.base.randomness import seeded, torch_rng
from fednca.base.tensors import Layout, Packed
from fednca.config import AugmentConfig, TrainConfig
from fednca.engines.augment import augment, draw
from fednca.engines.contract import Trained
from fednca.engines.images import Change, Shard
from fednca.engines.optimizer import VectorOptimizer, added, bind
from fednca.engines.scoring import autocast, predict
from fednca.methods.contract import Local, Method, Tensors, Update

# Images in a batch when a rule adds up sums after the last step; more on a GPU with much memory.
FINISH_BATCH, LARGE_FINISH_BATCH = 128, 512
LARGE_MEMORY = 32 * 2**30


class Trainer:
    """Trains, scores and adds up for one client after another, on one model that every update overwrites."""

    def __init__(self, method: Method, model: nn.Module, config: TrainConfig, seed: int) -> None:
        """Take what is the same for all clients and rounds."""
        self.method, self.model, self.config, self.seed = method, model, config, seed

    def update(
        self, number: int, client: int, shard: Shard, start: Tensors, received: Tensors, state: Tensors
    ) -> Trained:
        """Train one client from what the server sent, with random numbers of its own in round `number`."""
        device = next(self.model.parameters()).device
        with seeded(self.seed, "dropout", number, client):
            local = Local(
                client=client,
                round=number,
                lr=self.config.lr,
                learner=self.method.learner,
                model=self.model,
                start=start,
                received=received,
                state={name: tensor.to(device) for name, tensor in state.items()},
                rng=torch_rng(self.seed, "losses", number, client),
                samples=len(shard),
            )
            order = torch_rng(self.seed, "batches", number, client)
            change = make_change(self.config.augment, torch_rng(self.seed, "augment", number, client))
            weights, optimizer = self.scratch
            bind(self.model, weights).load_state_dict(start)
            optimizer.reset()
            return local_update(self.method, local, optimizer, shard, self.config, order, change)

    @cached_property
    def scratch(self) -> tuple[Packed, VectorOptimizer]:
        """The trainable weights and their optimiser, both used again for every client; made when first needed."""
        trainable = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        weights = Packed.zeros(Layout.of(trainable), next(iter(trainable.values())).device)
        return weights, VectorOptimizer(weights, list(trainable), self.config, self.method)

    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives for a shard's images."""
        self.model.load_state_dict(weights)
        return predict(self.method, self.model, shard, batch_size, self.config)

    @torch.no_grad()
    def sums(self, weights: Tensors, shard: Shard, batch_size: int, asked: Tensors) -> Tensors:
        """Return a client's sums for one exchange of the closing, for a model with these weights."""
        assert self.method.closing is not None
        self.model.load_state_dict(weights)
        model, closing = self.model.eval(), self.method.closing
        with autocast(next(model.parameters()).device, self.config):
            return add_up(closing.sums(model, *batch, asked) for batch in shard.batches(batch_size))


def make_change(config: AugmentConfig, rng: torch.Generator) -> Change | None:
    """Return the augmentation of one local update, or None if none is configured."""
    if config == AugmentConfig():
        return None
    return lambda images: augment(images, draw(len(images), rng).to(images), config)


def local_update(
    method: Method,
    local: Local,
    optimizer: VectorOptimizer,
    shard: Shard,
    config: TrainConfig,
    order: torch.Generator,
    change: Change | None = None,
) -> Trained:
    """Train one client's model for its local epochs; it holds the global weights at the start."""
    model = local.model.train()
    if not local.state:
        local.state = method.rule.start_client(local.weights)
    if method.rule.centralized and local.state:
        optimizer.load(local.state)
    totals: Tensors = {}
    for _ in range(config.local_epochs):
        for images, labels in shard.batches(config.batch_size, order, change):
            terms = train_step(method, local, optimizer, images, labels, config)
            for name, term in terms.items():
                totals[name] = totals.get(name, 0) + term.detach() * len(images)
    extra = finish(method, local, shard, config)
    if method.rule.centralized:
        local.state |= optimizer.dump()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    update = Update(local.client, weights, extra, len(shard), local.steps)
    seen = len(shard) * config.local_epochs
    return Trained(update, local.state, {name: float(total) / seen for name, total in totals.items()})


def finish(method: Method, local: Local, shard: Shard, config: TrainConfig) -> Tensors:
    """Let the rule finish a client's update, and return what the client uploads besides the weights."""
    device, sums = next(local.model.parameters()).device, {}
    if method.rule.adds_up:
        with autocast(device, config):
            sums = add_up(method.rule.sums(local, *batch) for batch in shard.batches(finish_batch(device)))
    return method.rule.finish(local, sums)


def finish_batch(device: torch.device) -> int:
    """Return the batch size for the sums that `finish` needs."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > LARGE_MEMORY
    return LARGE_FINISH_BATCH if large else FINISH_BATCH


def add_up(parts: Iterable[Tensors]) -> Tensors:
    """Add up tensors of the same names.

    >>> add_up([{"a": torch.tensor(1)}, {"a": torch.tensor(2)}])
    {'a': tensor(3)}
    """
    total: Tensors = {}
    for part in parts:
        if total:
            torch._foreach_add_(list(total.values()), [part[name].detach() for name in total])
        else:
            total = {name: tensor.detach().clone() for name, tensor in part.items()}
    return total


def train_step(
    method: Method, local: Local, optimizer: VectorOptimizer, images: Tensor, labels: Tensor, config: TrainConfig
) -> Tensors:
    """Take one optimiser step, and return the loss terms of the batch."""
    with autocast(images.device, config):
        terms = method.learner.losses(local.model, images, labels, local)
    terms = terms | method.rule.penalties(local)
    optimizer.take(torch.autograd.grad(added(terms), list(local.weights.values()), allow_unused=True))
    optimizer.step()
    with torch.no_grad():
        method.rule.correct(local)
    local.steps += 1
    return terms
