"""A federation small enough for a test: tiny digits, a narrow network, seconds on one core."""

import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fednca.bench.cells import Bench, plan_bench
from fednca.config import Config, load_config
from fednca.methods.contract import Learner
from fednca.runs.callbacks import Callback

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
