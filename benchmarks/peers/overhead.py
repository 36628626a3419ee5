"""Rounds on Flower's simulation that train almost nothing: a minimal app of Flower's, and ours.

The minimal app's clients return what they got at once, and Flower's FedAvg averages it. Ours is the real app on a few
tiny images. All processes of a machine share one clock, so their marks can be compared.

`python -m peers.overhead APP FOLDER` runs an app with FOLDER/config.toml and writes its marks to FOLDER.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from fednca.config import Config, load_config
from fednca.data.processes import cores
from fednca.data.sources import get_source
from fednca.engines.local_update import Trainer
from fednca.engines.model import build_model
from fednca.flower import client, server
from fednca.flower.config import ServerConfig
from fednca.flower.engine import FlowerEngine
from fednca.methods import create_method

MARKS = "FEDNCA_BENCH_MARKS"  # folder that gets one file of marks per process

noop = ClientApp()
ours = ClientApp()


@noop.train()
def give_back(message: Message, context: Context) -> Message:
    """Return the arrays that were sent."""
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


@noop.evaluate()
def say_nothing(message: Message, context: Context) -> Message:
    """Return a number that means nothing."""
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.0})}), reply_to=message)


@ours.query()
def announce(message: Message, context: Context) -> Message:
    """Answer as our app does."""
    return client.announce(message, context)


@ours.train()
def train(message: Message, context: Context) -> Message:
    """Answer as our app does, and mark how long it trains."""
    clock("update")
    return client.train(message, context)


@ours.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer as our app does, and mark how long it predicts."""
    clock("predict")
    return client.evaluate(message, context)


def clock(name: str) -> None:
    """Let the trainer of this process note when each call of a function begins and ends, from now on."""
    function = getattr(Trainer, name)
    if hasattr(function, "clocked"):
        return

    def clocked(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = function(*arguments, **options)
        mark("work", began, time.perf_counter())
        return found

    clocked.clocked = True  # type: ignore[attr-defined]
    setattr(Trainer, name, clocked)


def mark(what: str, *times: float) -> None:
    """Append a line to this process's file of marks."""
    with (Path(os.environ[MARKS]) / f"{what}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(times) + "\n")


class Marked(FedAvg):
    """Flower's FedAvg that marks the start of rounds, and evaluates every second one."""

    def configure_train(self, server_round: int, *others: Any) -> Any:
        mark("round", time.perf_counter())
        return super().configure_train(server_round, *others)

    def configure_evaluate(self, server_round: int, *others: Any) -> Any:
        return [] if server_round % 2 else super().configure_evaluate(server_round, *others)


def serve_noop(grid: Grid, config: Config, model: nn.Module, folder: Path) -> None:
    """Run rounds with a model of the same size as ours."""
    clients = config.partition.clients
    strategy = Marked(min_train_nodes=clients, min_evaluate_nodes=clients, min_available_nodes=clients)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=config.train.rounds)


def serve_ours(grid: Grid, config: Config, model: nn.Module, folder: Path) -> None:
    """Play rounds of a run as every user would."""
    ask_to_train = FlowerEngine.train

    def marked(*arguments: Any) -> Any:
        mark("round", time.perf_counter())
        return ask_to_train(*arguments)

    FlowerEngine.train = marked
    server.serve(grid, ServerConfig(config=str(folder / "config.toml"), out=str(folder / "run")))


def main(name: str, folder: Path) -> None:
    """Run one app on the simulation, with one core per worker."""
    config = load_config(folder / "config.toml")
    classes = tuple(get_source(config.data.name).CLASSES)
    # Build before Ray starts: it forks its processes, and they hang if another thread is importing at that moment.
    model = build_model(config, create_method(config), classes, pretrained="none")
    os.environ[MARKS] = str(folder)
    serve, clients = {"flower": (serve_noop, noop), "fednca": (serve_ours, ours)}[name]
    resources = {"init_args": {"num_cpus": cores()}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    server_app = ServerApp()
    server_app.main()(lambda grid, context: serve(grid, config, model, folder))
    run_simulation(server_app, clients, config.partition.clients, backend_config=resources)


if __name__ == "__main__":
    from peers import overhead  # objects that Ray sends to its workers must not belong to `__main__`

    overhead.main(sys.argv[1], Path(sys.argv[2]))
