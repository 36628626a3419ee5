"""A federation small enough for a test: tiny digits, a narrow network, seconds on one core."""

import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fednca.bench.cells import Bench, plan_bench
from fednca.config import Config, TrainConfig, load_config
from fednca.engines.images import ImageStore, Shard
from fednca.engines.local_update import Trainer
from fednca.engines.workplace import build_workplace
from fednca.methods.contract import About, Learner, Local, Method, Rule
from fednca.models import Classifier, build_backbone
from fednca.runs import Callback, Run

TINY = {
    "data.options": {
        "train_singles": 12,
        "train_pairs": 2,
        "val_singles": 3,
        "val_pairs": 1,
        "test_singles": 3,
        "test_pairs": 1,
    },
    "partition.clients": 3,
    "partition.beta": 1.0,
    "partition.gamma": 0.9,
    "partition.min_samples": 8,
    "train.rounds": 3,
    "train.local_epochs": 1,
    "train.lr": 1e-3,
    "device": "cpu",
    "engine": "eager",
    "threads": 1,
}
SHORT = TINY | {"train.rounds": 2}


def tiny(**changes: object) -> Config:
    """Return the tiny config; `train__rounds=1` sets `train.rounds`."""
    return load_config("demo", TINY | {name.replace("__", "."): value for name, value in changes.items()})


def composite_counts(class_counts: Sequence[int], singles: int | None, pairs: int) -> tuple[int, NDArray[np.float64]]:
    """Return how many canvases `compose` should make, and the share of them that should show each class, (C,)."""
    alone = np.array([count if singles is None else singles for count in class_counts])
    partners = len(alone) - 1
    total = int(alone.sum()) + pairs * len(alone) * partners // 2
    return total, (alone + pairs * partners) / total


def plan(folder: Path, *methods: str, seeds: Sequence[int] = (0,), **changes: object) -> Bench:
    """Plan a bench of the tiny config with two rounds."""
    overrides = SHORT | {name.replace("__", "."): value for name, value in changes.items()}
    return plan_bench("demo", overrides, methods, seeds, folder)


class LeastSquares(Learner):
    """Half the mean squared error of a linear model; the points (x, y) travel as labels."""

    def losses(self, model, images, labels, local):
        x, y = labels.split(1, dim=1)
        return {"square": (model(x) - y).square().mean() / 2}


def method_of(learner: Learner, rule: Rule | None = None) -> Method:
    """Return a method of these parts, without a closing."""
    return Method("tested", About("", "", ""), learner, rule or Rule())


def line_trainer(rule: Rule, config: TrainConfig) -> Trainer:
    """Return what trains y = w·x with one weight, which is called "weight"."""
    return Trainer(method_of(LeastSquares(), rule), nn.Linear(1, 1, bias=False).double(), config, seed=0)


def one_point(x: float, y: float) -> Shard:
    """Return the data of a client that has a single point."""
    store = ImageStore(torch.zeros(1, 1, 1, 3, dtype=torch.uint8), torch.zeros(3), torch.ones(3))
    return Shard(store, torch.arange(1), torch.tensor([[x, y]], dtype=torch.float64))


def small_model(learner: Learner, classes: str = "abcdef") -> Classifier:
    """Return the small network with a learner's head, the same at every call; a class is a letter."""
    torch.manual_seed(0)
    return Classifier(build_backbone("resnet-small"), learner.build_head(tuple(classes), 64))


def local_of(model: nn.Module, learner: Learner, **fields: object) -> Local:
    """Return a client that begins its update with a model."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rest = {"start": start, "received": {}, "state": {}, "rng": torch.Generator()} | fields
    return Local(0, 1, 0.1, learner, model, **rest)


def pooled_features(run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return all clients' features (N, d) under a run's best model, and their labels (N, C)."""
    place = build_workplace(run.config, run.method, run.federation, run.model("best"), torch.device("cpu"))
    batches = [batch for shard in place.train for batch in shard.batches(64)]
    with torch.no_grad():
        features = torch.cat([place.model(images).features for images, _ in batches])
    return features.double().numpy(), torch.cat([labels for _, labels in batches]).double().numpy()


class Stop(BaseException):
    """Stands for a kill: nothing in the package catches it."""


class StopAfter(Callback):
    """Stops a run when a round is done."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, record, best) -> None:
        if record.number == self.rounds:
            raise Stop


def free_port() -> int:
    """Return a port on which nobody listens now."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])
