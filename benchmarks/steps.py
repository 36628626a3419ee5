"""Time a client's step on a GPU: an eager loop, CUDA graphs one after another and side by side, and the limit.

python benchmarks/steps.py [--sizes 64 224] [--method fednca-ml] [--clients 10] [--steps 20] [--json FILE]

All rows train the same random images with a ResNet-18 under the method's head, in bf16 and batches of 32. The limit
trains one model on batches of all clients together; nothing that keeps the clients apart can be faster. Building an
engine and its first round are not timed. Rows alternate and the best round counts.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from peers.flags import call, new_file
from rich.console import Console
from rich.table import Table

from fednca.base.devices import pick_device
from fednca.cli.flags import whole
from fednca.config import Config, load_config
from fednca.engines.eager import EagerEngine
from fednca.engines.graphs.engine import GraphEngine
from fednca.engines.images import Shard
from fednca.engines.local import LocalEngine, Workplace
from fednca.engines.model import build_model
from fednca.engines.workplace import build_store
from fednca.methods import create_method
from fednca.methods.contract import Server
from fednca.runs.training import first_state

CLASSES = tuple("abcdefg")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time client steps on a GPU.")
    parser.add_argument("--sizes", type=whole(1), nargs="+", default=[64, 224], help="image sizes in pixels")
    parser.add_argument("--method", default="fednca-ml")
    parser.add_argument("--clients", type=whole(1), default=10)
    parser.add_argument("--steps", type=whole(1), default=20, help="steps of a client in a round")
    parser.add_argument("--repeats", type=whole(1), default=5, help="rounds of each row; the best one counts")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the raw numbers")
    given = parser.parse_args()
    numbers = {}
    for size in given.sizes:
        changes = {
            "method.name": given.method,
            "data.image_size": size,
            "model.backbone": "resnet18",
            "train.precision": given.precision,
            "train.local_epochs": 1,
            "train.lr": 1e-4,
        }
        config = load_config("demo", changes)
        found = numbers[size] = measure(config, given.clients, given.steps, given.repeats)
        Console().print(table(found, f"{given.method}, {size} px, {given.clients} clients, {given.steps} steps each"))
    if given.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.json.write_text(json.dumps(facts | numbers, indent=1))


def measure(config: Config, clients: int, steps: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return, for each row, milliseconds per client and step, images per second and memory."""
    device = pick_device("cuda")
    images = clients * steps * config.train.batch_size
    together = config.replace({"train.batch_size": config.train.batch_size * clients})
    rows: dict[str, Callable[[], float]] = {}
    memory = {}
    for name, own, parts, slots in (
        ("eager loop", config, clients, 0),
        ("graphs, one after another", config, clients, 1),
        ("graphs, side by side", config, clients, clients),
        ("limit: one model, one batch", together, 1, 1),
    ):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        engine, server, everything = build(own, parts, images // parts, slots, device)
        rows[name] = round_of(engine, server, range(parts))
        rows[name]()  # builds what is built on first use
        memory[name] = torch.cuda.memory_reserved() - before
        if slots == clients:
            rows["evaluation"] = evaluation_of(engine, server, everything, config)
            rows["evaluation"]()
            memory["evaluation"] = 0
    rounds = [{name: run() for name, run in rows.items()} for _ in range(repeats)]
    seconds = {name: min(each[name] for each in rounds) for name in rows}
    return {
        name: {
            "ms": each * 1000 / (clients * steps),
            "images_per_second": images / each,
            "gib": memory[name] / 2**30,
        }
        for name, each in seconds.items()
    }


def build(
    config: Config, clients: int, images: int, slots: int, device: torch.device
) -> tuple[LocalEngine, Server, Shard]:
    """Return an engine on random images, graphs in so many slots or the eager one, its server and all images."""
    method, size, rng = create_method(config), config.data.image_size, np.random.default_rng(0)
    pixels = rng.integers(0, 256, (clients * images, size, size, 3), dtype=np.uint8)
    labels = (rng.random((len(pixels), len(CLASSES))) < 0.3).astype(np.int8)
    store = build_store(config, pixels, device)
    rows = np.arange(len(pixels)).reshape(clients, images)
    shards = [Shard.build(store, own, labels[own]) for own in rows]
    model = build_model(config, method, CLASSES, pretrained="none").to(device)
    everything, nothing = (Shard.build(store, np.arange(n), labels[:n]) for n in (len(pixels), 0))
    place = Workplace(config, method, model, shards, nothing, [], everything, device)
    engine = GraphEngine(place, slots) if slots else EagerEngine(place)
    return engine, first_state(method, model, clients).server, everything


def round_of(engine: LocalEngine, server: Server, clients: range) -> Callable[[], float]:
    """Return what trains a round and says how long it took."""

    def run() -> float:
        began = time.perf_counter()
        for _ in engine.train(1, clients, server, {}):
            pass
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return run


def evaluation_of(engine: LocalEngine, server: Server, everything: Shard, config: Config) -> Callable[[], float]:
    """Return what scores all images and says how long it took."""

    def run() -> float:
        began = time.perf_counter()
        engine.predict(server.weights, everything, config.evaluate.batch_size)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return run


def table(rows: dict[str, dict[str, float]], title: str) -> Table:
    """Return the table of the rows, with their ratios to the eager loop and to the limit."""
    found = Table("", title=title)
    for heading in ("ms / client step", "x eager", "x limit", "images/s", "GiB"):
        found.add_column(heading, justify="right")
    eager, limit = (rows[name]["ms"] for name in ("eager loop", "limit: one model, one batch"))
    for name, row in rows.items():
        numbers = [f"{row['ms']:.3f}", f"{eager / row['ms']:.1f}", f"{row['ms'] / limit:.2f}"]
        if name == "evaluation":
            numbers = ["", "", ""]
        memory = f"{row['gib']:.1f}" if row["gib"] else ""
        found.add_row(name, *numbers, f"{row['images_per_second']:,.0f}", memory)
    return found


if __name__ == "__main__":
    call(main)
