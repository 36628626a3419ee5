"""Time what a round over Flower costs besides training: our app and a minimal one, on the same simulation.

python benchmarks/flower_rounds.py [--clients 10] [--backbone resnet18]

The minimal app's clients return the weights at once, and Flower's FedAvg averages them. Ours is the whole app on a few
tiny images: its rounds include our checks, the line of history and the checkpoint. A round lasts until the next one
starts; all clients evaluate every second round. The time that the busiest worker spends on training and predicting is
measured and subtracted. The first round, in which workers load everything, does not count. Apps alternate; the best
repeat counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import mean

from peers.flags import call
from rich.console import Console
from rich.table import Table

from fednca.base.errors import RunFailedError
from fednca.config import Config, load_config
from fednca.data.processes import cores

BENCHMARKS = Path(__file__).parent
APPS = {"flower": "Flower, no-op", "fednca": "fednca"}
KINDS = {False: "trained", True: "trained and judged"}
SMALL = {
    "method.name": "fedavg",
    "data.image_size": 32,
    "data.options": {
        "train_singles": 12,
        "train_pairs": 2,
        "val_singles": 3,
        "val_pairs": 1,
        "test_singles": 3,
        "test_pairs": 1,
    },
    "partition.beta": 1.0,
    "partition.gamma": 0.9,
    "partition.min_samples": 2,
    "train.local_epochs": 1,
    "evaluate.every": 2,
    "device": "cpu",
}
LOG_LINES = 15  # shown when an app fails
LONGEST = 1800  # seconds that an app may take


@dataclass(frozen=True)
class Round:
    """The seconds of a round, and those that the busiest worker spent on training and predicting."""

    seconds: float
    work: float
    judged: bool

    @property
    def beyond(self) -> float:
        """The seconds besides training and predicting."""
        return self.seconds - self.work


def main() -> None:
    parser = argparse.ArgumentParser(description="Time what rounds over Flower cost besides training.")
    parser.add_argument("--backbone", default="resnet18", help="backbone of the model that is sent")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a repeat; the first and the last do not count")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each app; the best one counts")
    given = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 120)
    own = {"model.backbone": given.backbone, "partition.clients": given.clients, "train.rounds": given.rounds}
    config = load_config("demo", SMALL | own)
    runs: dict[str, list[list[Round]]] = {app: [] for app in APPS}
    for repeat in range(given.repeats):
        for app, label in APPS.items():
            runs[app].append(measure(app, config))
            told = ", ".join(f"{each.seconds:.2f}" for each in runs[app][-1])
            console.print(f"[dim]{repeat + 1}. {label}: {told} s, load {os.getloadavg()[0]:.1f}[/dim]")
    console.print(comparison(runs, config))


def measure(app: str, config: Config) -> list[Round]:
    """Run an app in its own process and return its rounds without the first and the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(config.to_toml())
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
        command = [sys.executable, "-m", "peers.overhead", app, name]
        with (folder / "log.txt").open("w") as log:  # processes that Ray leaves behind would keep a pipe open
            done = subprocess.run(command, env=os.environ | own, stdout=log, stderr=log, timeout=LONGEST, check=False)
        begins = [begin for marks in read_marks(folder, "round") for (begin,) in marks]
        if done.returncode or len(begins) < config.train.rounds:
            last = (folder / "log.txt").read_text().splitlines()[-LOG_LINES:]
            raise RunFailedError(f"the app '{app}' failed; the end of its log:\n" + "\n".join(last))
        return cut(begins, read_marks(folder, "work"), config.evaluate.every)[1:]


def read_marks(folder: Path, what: str) -> list[list[list[float]]]:
    """Return the marks of each process."""
    paths = sorted(folder.glob(f"{what}-*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def cut(begins: Sequence[float], workers: Iterable[Sequence[Sequence[float]]], every: int) -> list[Round]:
    """Cut time into rounds by their starts; workers: for each, the start and end of its pieces of work.

    >>> cut([0.0, 5.0, 9.0], [[(1.0, 2.0), (6.0, 7.0)], [(1.0, 1.5), (3.0, 4.0)]], every=2)
    [Round(seconds=5.0, work=1.5, judged=False), Round(seconds=4.0, work=1.0, judged=True)]
    """
    rounds = []
    for number, (begin, end) in enumerate(pairwise(begins), start=1):
        busy = [sum(b - a for a, b in marks if begin <= a < end) for marks in workers]
        rounds.append(Round(end - begin, max(busy, default=0.0), number % every == 0))
    return rounds


def comparison(runs: dict[str, list[list[Round]]], config: Config) -> Table:
    """Return the table of the best repeats."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("flwr", "ray", "torch"))
    clients = f"{config.partition.clients} clients on {cores()} cores"
    table = Table("", "rounds", title=f"{config.model.backbone}, {clients}, {versions}")
    for heading in ("s / round", "beyond training", "x Flower's no-op"):
        table.add_column(heading, justify="right")
    for judged, kind in KINDS.items():
        best = {app: best_repeat(several, judged) for app, several in runs.items()}
        for app, (seconds, beyond) in best.items():
            cells = (f"{seconds:.2f}", f"{beyond:.2f}", f"{beyond / best['flower'][1]:.2f}")
            table.add_row(APPS[app], kind, *cells)
    return table


def best_repeat(runs: list[list[Round]], judged: bool) -> tuple[float, float]:
    """Return mean seconds of a kind of round, in all and beyond training, from the repeat with the least beyond it."""
    kinds = [[each for each in rounds if each.judged == judged] for rounds in runs]
    means = [(mean(each.seconds for each in rounds), mean(each.beyond for each in rounds)) for rounds in kinds]
    return min(means, key=lambda pair: pair[1])


if __name__ == "__main__":
    call(main)
