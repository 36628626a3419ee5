"""The work of every row: the same federation, initial weights, batches, optimiser, loss and average."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fednca.base.devices import pick_device
from fednca.base.errors import FedncaError
from fednca.base.randomness import numpy_rng, torch_rng
from fednca.config import AugmentConfig, Config
from fednca.data.load import federate
from fednca.engines.images import ImageStore, Shard, batch_bounds
from fednca.engines.local import Workplace
from fednca.engines.model import build_model
from fednca.engines.optimizer import make_optimizer
from fednca.engines.scoring import autocast
from fednca.engines.workplace import build_store, build_workplace
from fednca.methods import create_method
from fednca.methods.contract import Method, Tensors
from fednca.runs.rounds import choose_clients

SYNTHETIC_IMAGES = 64  # per client
SYNTHETIC_CLASSES = tuple("abcdefghij")


@dataclass(frozen=True)
class Work:
    """A federation and a model, both built; the clock starts after this."""

    config: Config
    method: Method
    model: nn.Module  # scratch space; every row starts from `initial`
    initial: Tensors
    device: torch.device
    classes: tuple[str, ...]
    shards: list[Shard]  # one per client
    test: Shard | None

    @property
    def rounds(self) -> range:
        """The round numbers, from 1."""
        return range(1, self.config.train.rounds + 1)

    def chosen(self, number: int) -> list[int]:
        """Return the clients that train in a round."""
        return choose_clients(self.config, len(self.shards), number)

    def place(self, engine: str) -> Workplace:
        """Return what one of our engines works with."""
        config, first = self.config.replace({"engine": engine}), self.shards[0]
        nothing = replace(first, rows=first.rows[:0], labels=first.labels[:0])
        test = nothing if self.test is None else self.test
        return Workplace(config, self.method, self.model, self.shards, nothing, [], test, self.device)

    def count(self) -> tuple[int, int]:
        """Return how many steps all clients take and how many images they train on, over all rounds."""
        epochs, size = self.config.train.local_epochs, self.config.train.batch_size
        visits = [len(self.shards[client]) for number in self.rounds for client in self.chosen(number)]
        return epochs * sum(len(batch_bounds(images, size)) for images in visits), epochs * sum(visits)


@dataclass(frozen=True)
class Outcome:
    """The seconds of a row and its final global weights."""

    seconds: float
    weights: Tensors | None


def load_work(config: Config) -> Work:
    """Build the configured federation and model."""
    method, device = create_method(config), pick_device(config.device)
    federation = federate(config)
    classes = federation.dataset.classes
    model = build_model(config, method, classes, pretrained=config.model.pretrained)
    place = build_workplace(config, method, federation, model, device)
    return Work(config, method, place.model, copy_of(place.model), device, classes, place.train, place.test)


def synthetic_work(config: Config) -> Work:
    """Build a federation of random images and labels in memory, with equally many images for each client."""
    method, device = create_method(config), pick_device(config.device)
    clients, size, classes = config.partition.clients, config.data.image_size, SYNTHETIC_CLASSES
    rng = numpy_rng(config.seed, "synthetic")
    total = clients * SYNTHETIC_IMAGES
    pixels = rng.integers(0, 256, (total, size, size, 3), dtype=np.uint8)
    labels = rng.integers(0, 2, (total, len(classes)), dtype=np.int8)
    store = build_store(config, pixels, device)
    rows = np.arange(total).reshape(clients, SYNTHETIC_IMAGES)
    shards = [Shard.build(store, own, labels[own]) for own in rows]
    model = build_model(config, method, classes, pretrained="none").to(device)
    return Work(config, method, model, copy_of(model), device, classes, shards, None)


def copy_of(model: nn.Module) -> Tensors:
    """Return a copy of a model's weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def refuse_what_peers_cannot(config: Config) -> None:
    """Refuse settings that the other simulators handle differently, since the rows would not be comparable."""
    train = config.train
    if train.participation != 1 or train.weighting != "equal" or train.augment != AugmentConfig():
        raise FedncaError(
            "the other simulators train all clients, without augmentation, and average them equally; use these settings"
        )


def epochs(shard: Shard, config: Config, number: int, client: int) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """Yield, for each local epoch, the batches on which our engines train a client in a round."""
    order = torch_rng(config.seed, "batches", number, client)
    for _ in range(config.train.local_epochs):
        yield shard.batches(config.train.batch_size, order)


def loss_of(method: Method, model: nn.Module, images: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Return the method's loss on a batch."""
    with autocast(images.device, config.train):
        terms = method.learner.losses(model, images, labels, None)  # type: ignore[arg-type]
    return torch.stack(list(terms.values())).sum()


def train_locally(model: nn.Module, method: Method, shard: Shard, config: Config, number: int, client: int) -> None:
    """Train a client from the model's current weights in an ordinary loop."""
    model.train()
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = ordinary_optimizer(trainable, config, method)
    clip_norm = clip_norm_of(config, method)
    for batches in epochs(shard, config, number, client):
        for images, labels in batches:
            optimizer.zero_grad()
            loss_of(method, model, images, labels, config).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(trainable.values(), clip_norm)
            optimizer.step()


def ordinary_optimizer(weights: Tensors, config: Config, method: Method) -> torch.optim.Optimizer:
    """Create our engines' optimiser in torch's default implementation."""
    optimizer = make_optimizer(weights.values(), config.train, method)
    for group in optimizer.param_groups:
        group |= {"fused": None, "capturable": False}
    return optimizer


def clip_norm_of(config: Config, method: Method) -> float | None:
    """Return the largest gradient norm, if there is one."""
    return config.train.clip_norm or method.learner.clip_norm


def own_store(shard: Shard) -> Shard:
    """Return a client's shard whose store holds only its own images, to send to another process."""
    pixels = shard.store.pixels
    taken = torch.from_numpy(pixels.take(shard.rows.numpy())) if not isinstance(pixels, Tensor) else pixels[shard.rows]
    return Shard(ImageStore(taken, shard.store.mean, shard.store.std), torch.arange(len(shard)), shard.labels)


def largest_distance(weights: Tensors, reference: Tensors) -> float:
    """Return the largest relative L2 distance between floating-point tensors of the same name."""
    found = 0.0
    for name, wanted in reference.items():
        if wanted.is_floating_point() and (norm := float(wanted.double().norm())):
            found = max(found, float((weights[name].double() - wanted.double()).norm()) / norm)
    return found if math.isfinite(found) else math.inf
