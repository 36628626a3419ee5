"""Time ten rounds of our engines, a plain PyTorch loop, pfl-research and Flower's simulation on the same work.

python benchmarks/rounds.py [--method fedavg] [--rows plain,eager,processes] [--set model.backbone=resnet18 ...]
python benchmarks/rounds.py --scaling     how the cost of our engines grows with clients and image size

The clock starts when federation and model are built and stops at the final weights. It includes the start of a row's
own processes. All rows train the same batches from the same weights; the last columns check it. Rows alternate and the
best repeat counts. Where threads could help, one thread and one per core are both tried, and the better counts.
"""

import argparse
import json
import os
import platform
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch
from peers.flags import call, new_file
from peers.launch import Measured, launch
from peers.rows import ROWS
from peers.work import SYNTHETIC_IMAGES, Work, largest_distance, load_work
from rich.console import Console
from rich.table import Table

from fednca.base.devices import pick_device
from fednca.base.errors import FedncaError, unknown_name
from fednca.cli.flags import whole
from fednca.config import Config, leaves, load_config
from fednca.config.fields import parse_value
from fednca.data.processes import cores
from fednca.engines.eager import EagerEngine
from fednca.measures.metrics import multilabel_metrics
from fednca.methods.contract import Tensors

Key = tuple[str, int]  # row and threads
MEBI = 2**20
FAR_SLOWER = 1.5
TAKING_PART = 10  # clients in each round of the scaling table
SCALING_CLIENTS = (10, 100, 1000)
SCALING_SIZES = {"cpu": (16, 32, 64), "cuda": (64, 112, 224)}
ENGINES = ("eager", "processes", "graphs")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rounds of our engines and of other simulators.")
    parser.add_argument("--preset", default="demo", help="preset or TOML file (default: demo)")
    parser.add_argument(
        "--method", choices=["fedavg", "fednca-ml"], default="fedavg", help="method whose loss is trained"
    )
    parser.add_argument("--rounds", type=whole(1), default=10)
    parser.add_argument("--repeats", type=whole(1), default=3, help="repeats of each row; the best one counts")
    parser.add_argument(
        "--rows", help=f"rows to run, separated by commas (default: all that can run; {','.join(ROWS)})"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a setting, as in model.backbone=resnet18",
    )
    parser.add_argument(
        "--brief", action="store_true", help="skip the runs of a single round, and with them two columns"
    )
    parser.add_argument("--scaling", action="store_true", help="print the other table: more clients, larger images")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the raw numbers")
    given = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 160)
    config = configure(given.preset, given.method, given.rounds, given.set)
    names = None if given.rows is None else given.rows.split(",")
    if given.scaling:
        numbers = scaling(config, names, given.repeats, console)
    else:
        numbers = compare(config, names, given.repeats, console, brief=given.brief)
    if given.json:
        facts = {"machine": machine(config), "config": config.model_dump(mode="json")}
        given.json.write_text(json.dumps(facts | numbers, indent=1))


def configure(preset: str, method: str, rounds: int, changes: list[str]) -> Config:
    """Return the preset with the changes that the flags ask for."""
    fields = dict(leaves())
    overrides: dict[str, Any] = {"method.name": method, "train.rounds": rounds}
    for change in changes:
        path, _, text = change.partition("=")
        if path not in fields:
            raise unknown_name("setting", path, fields)
        overrides[path] = parse_value(path, fields[path], text)
    return load_config(preset, overrides)


def machine(config: Config) -> dict[str, Any]:
    """Return the facts that the numbers depend on: device, cores and versions."""
    device = pick_device(config.device)
    versions = {}
    for package in ("torch", "pfl", "flwr", "ray"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "cores": cores(), "python": platform.python_version(), **versions}


def choose_rows(names: list[str] | None, known: list[str]) -> list[str]:
    """Return the named rows, all by default, or refuse an unknown name."""
    for name in names or []:
        if name not in known:
            raise unknown_name("row", name, known)
    return names or known


# -- the same work in every row ---------------------------------------------------------------------------------------


def compare(config: Config, names: list[str] | None, repeats: int, console: Console, *, brief: bool) -> dict[str, Any]:
    """Measure all rows, print their table and return the raw numbers."""
    rows = choose_rows(names, list(ROWS))
    first = {} if brief else first_rounds(config, rows, console)
    runs = measure(config, rows if brief else list(first), repeats, console)
    if not runs:
        raise FedncaError("none of these rows can run here; the lines above say why")
    rows = list(dict.fromkeys(row for row, _ in runs))
    best = {row: min((key for key in runs if key[0] == row), key=lambda key: fastest(runs[key])) for row in rows}
    work = load_work(config)
    lines = {row: describe(row, best[row], first, runs, work) for row in rows}
    facts = machine(config)
    load = max(run.load_before for several in runs.values() for run in several)
    title = f"{config.method.name}, {len(work.shards)} clients, {config.train.rounds} rounds, best of {repeats}"
    versions = ", ".join(f"{name} {value}" for name, value in facts.items())
    console.print(comparison(lines, f"{title}\n{versions}; load up to {load:.1f}"))
    raw = [
        {"row": row, "threads": threads} | {k: v for k, v in asdict(run).items() if k not in ("weights", "left_out")}
        for (row, threads), several in runs.items()
        for run in several
    ]
    return {"rows": lines, "runs": raw}


def first_rounds(config: Config, names: list[str], console: Console) -> dict[str, Measured]:
    """Run one round of each row, with its memory, and leave out rows that cannot run."""
    on_cpu = pick_device(config.device).type == "cpu"  # on a GPU the row itself reports its memory
    found = {row: launch(row, config.replace({"train.rounds": 1}), 1, watch=on_cpu) for row in names}
    return {row: run for row, run in found.items() if not is_left_out(row, run, console)}


def is_left_out(row: str, run: Measured, console: Console) -> bool:
    """Return whether a row could not run, and print why."""
    if run.left_out:
        console.print(f"{ROWS[row].label}: left out, {run.left_out}", markup=False)  # extras are in brackets
    return bool(run.left_out)


def measure(config: Config, names: list[str], repeats: int, console: Console) -> dict[Key, list[Measured]]:
    """Time all rows; return the runs by row and number of threads."""
    device, runs = pick_device(config.device), dict[Key, list[Measured]]()
    for repeat in range(repeats):
        for row in names:
            for threads in worth_repeating(row, runs, device):
                run = launch(row, config, threads)
                if is_left_out(row, run, console):
                    continue
                if runs.setdefault((row, threads), []):
                    run = replace(run, weights=None)  # the first repeat's weights are enough
                runs[row, threads].append(run)
                spent = f"{run.seconds:.2f} s, load {os.getloadavg()[0]:.1f}"
                console.print(f"[dim]{repeat + 1}. {ROWS[row].label}, {threads} threads: {spent}[/dim]")
    return runs


def worth_repeating(row: str, runs: dict[Key, list[Measured]], device: torch.device) -> list[int]:
    """Return the numbers of threads to try, without those that were far slower before."""
    numbers = ROWS[row].threads(device)
    times = {threads: fastest(runs[row, threads]) for threads in numbers if (row, threads) in runs}
    return [n for n in numbers if n not in times or times[n] < FAR_SLOWER * min(times.values())]


def fastest(runs: list[Measured]) -> float:
    """Return the seconds of the best repeat."""
    return min(run.seconds for run in runs)


def describe(
    row: str, key: Key, first: dict[str, Measured], runs: dict[Key, list[Measured]], work: Work
) -> dict[str, Any]:
    """Return a row's numbers; its distance is measured to the weights of the eager engine with one thread."""
    run, seconds = runs[key][0], fastest(runs[key])
    plain = min((fastest(several) for (name, _), several in runs.items() if name == "plain"), default=None)
    line = {
        "label": ROWS[row].label,
        "threads": key[1],
        "seconds": seconds,
        "ms_per_client_step": seconds * 1000 / run.steps,
        "times_plain": plain / seconds if plain else None,
        "images_per_second": run.images / seconds,
        "memory": run.memory or (first[row].memory if first else None),
    }
    if run.weights is not None:
        line |= judge(work, run.weights)
        if "eager" in first:
            line["distance_first_round"] = distance(first[row], first["eager"])
        if ("eager", 1) in runs:
            line["distance"] = distance(run, runs["eager", 1][0])
    return line


def distance(run: Measured, reference: Measured) -> float:
    """Return the distance between the weights of two runs."""
    assert run.weights is not None
    assert reference.weights is not None
    return largest_distance(run.weights, reference.weights)


def judge(work: Work, weights: Tensors) -> dict[str, float | None]:
    """Return the metrics of weights on the test images; all rows use this, and it is not timed."""
    assert work.test is not None
    on_device = {name: tensor.to(work.device) for name, tensor in weights.items()}
    engine = EagerEngine(work.place("eager"))
    probabilities = engine.predict(on_device, work.test, work.config.evaluate.batch_size)
    metrics = multilabel_metrics(probabilities, work.test.labels).as_dict()
    return {name: metrics[name] for name in ("macro_auc", "macro_f1")}


def comparison(lines: dict[str, dict[str, Any]], title: str) -> Table:
    """Return the table of the rows."""
    columns = {
        "threads": ("threads", "d"),
        "seconds": ("s", ".2f"),
        "ms_per_client_step": ("ms / client step", ".2f"),
        "times_plain": ("x plain", ".2f"),
        "images_per_second": ("images/s", ",.0f"),
        "memory": ("MiB", ",.0f"),
        "macro_auc": ("macro AUC", ".4f"),
        "macro_f1": ("macro F1", ".4f"),
        "distance_first_round": ("from eager, round 1", ".0e"),
        "distance": ("at the end", ".0e"),
    }
    table = Table("", title=title)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for line in lines.values():
        shown = line | {"memory": line["memory"] and line["memory"] / MEBI}
        cells = [(shown.get(name), form) for name, (_, form) in columns.items()]
        table.add_row(line["label"], *("-" if value is None else format(value, form) for value, form in cells))
    return table


# -- more clients, larger images -----------------------------------------------------------------------------------


def scaling(config: Config, names: list[str] | None, repeats: int, console: Console) -> dict[str, Any]:
    """Time our engines on random images, print the table and return the raw numbers."""
    settings = [(clients, config.data.image_size) for clients in SCALING_CLIENTS]
    sizes = SCALING_SIZES[pick_device(config.device).type]
    settings += [(TAKING_PART, size) for size in sizes if size != config.data.image_size]
    each = f"{TAKING_PART} clients in a round, {SYNTHETIC_IMAGES} images each"
    table = Table("", title=f"{config.method.name}, {config.model.backbone}, {each}")
    for heading in ("clients", "px", "images, MiB", "s / round", "ms / client step", "images/s", "MiB"):
        table.add_column(heading, justify="right")
    numbers = []
    for row in choose_rows(names, list(ENGINES)):
        for clients, size in settings:
            found = scale(config, row, clients, size, repeats)
            if isinstance(found, str):
                console.print(f"{ROWS[row].label}: left out, {found}", markup=False)
                break
            numbers.append(found)
            table.add_row(
                ROWS[row].label,
                f"{clients:,}",
                str(size),
                f"{found['image_bytes'] / MEBI:,.1f}",
                f"{found['seconds'] / config.train.rounds:.3f}",
                f"{found['seconds'] * 1000 / found['steps']:.2f}",
                f"{found['images'] / found['seconds']:,.0f}",
                f"{found['memory'] / MEBI:,.0f}",
            )
    console.print(table)
    return {"scaling": numbers}


def scale(config: Config, row: str, clients: int, size: int, repeats: int) -> dict[str, Any] | str:
    """Return one line of the scaling table, or the reason why the row cannot run."""
    participation = TAKING_PART / clients
    own = {"partition.clients": clients, "data.image_size": size, "train.participation": participation}
    config = config.replace(own)
    runs = []
    for _ in range(repeats):
        runs.append(launch(row, config, 1, synthetic=True))
        if runs[-1].left_out:
            return runs[-1].left_out
    best = min(runs, key=lambda run: run.seconds)
    one_round = config.replace({"train.rounds": 1})
    return {
        "row": row,
        "clients": clients,
        "image_size": size,
        "image_bytes": clients * SYNTHETIC_IMAGES * size * size * 3,
        "seconds": best.seconds,
        "steps": best.steps,
        "images": best.images,
        "memory": best.memory or launch(row, one_round, 1, synthetic=True, watch=True).memory,
    }


if __name__ == "__main__":
    call(main)
