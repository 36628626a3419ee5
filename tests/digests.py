"""Digests of the weights that short runs end with, to prove that a change of the code changes no result.

    python tests/digests.py --write before.json     # before a change
    python tests/digests.py --compare before.json   # after it: exit code 1 and a list where any differs

Both calls must be made on the same machine: another processor rounds otherwise. Each row is a short run of the tests'
tiny federation on one CPU thread: every method, rules on other learners, losses, variants, each once by the eager
engine; some by processes, by the graph engine's CPU path and over Flower's messages.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "flower")]

import torch
from flwr.supercore.task_identity import TaskIdentity
from helpers import tiny
from in_process import settings_for, simulated

from fednca.flower.server import serve
from fednca.runs import Run, train

SHORT = {"train__rounds": 2, "train__participation": 0.7}
METHODS = (
    *("centralized", "fedadam", "fedavg", "fedavg-asl", "fedavg-balanced", "fedavgm", "fedcurv", "fedetf", "fedlgt"),
    *("fednca-ml", "fedprox", "fedyogi", "ml-decoder", "scaffold", "spherefed"),
)
RULES = ("centralized", "fedadam", "fedavg", "fedavgm", "fedcurv", "fedprox", "fedyogi", "scaffold")
LEARNERS = ("fedetf", "fedlgt", "fednca-ml", "ml-decoder", "spherefed")
OPTIONS = {
    "fedavg head=mlp": {"method__name": "fedavg", "method__options": {"head": "mlp"}},
    "fedprox head=mlp": {"method__name": "fedprox", "method__options": {"head": "mlp"}},
    "fednca-ml variant=released": {"method__name": "fednca-ml", "method__options": {"variant": "released"}},
    "fednca-ml released train_etf": {
        "method__name": "fednca-ml",
        "method__options": {"variant": "released", "train_etf": True},
    },
    "fednca-ml head=etf": {"method__name": "fednca-ml", "method__options": {"head": "etf"}},
    "fednca-ml queries=learnable": {
        "method__name": "fednca-ml",
        "method__options": {"queries": "learnable", "query_init": "random"},
    },
    "spherefed target=shifted": {"method__name": "spherefed", "method__options": {"target": "shifted"}},
    "fednca-ml criterion=balanced": {"method__name": "fednca-ml", "method__criterion": "balanced"},
    "fedlgt criterion=asl": {"method__name": "fedlgt", "method__criterion": "asl"},
    "fedavg sgd clip augment": {
        "method__name": "fedavg",
        "train__optimizer": "sgd",
        "train__momentum": 0.9,
        "train__clip_norm": 1.0,
        "train__augment__hflip": True,
        "train__augment__rotate": 10.0,
    },
    "fednca-ml weighting=samples local_epochs=2": {
        "method__name": "fednca-ml",
        "train__weighting": "samples",
        "train__local_epochs": 2,
    },
    "scaffold loss-mask": {"method__name": "scaffold", "partition__unmatched": "loss-mask", "partition__gamma": 0.5},
}
BY_PROCESSES = ("fedavg", "scaffold", "spherefed", "fedlgt")
OVER_FLOWER = ("fedavg", "fednca-ml", "scaffold", "fedcurv", "spherefed", "fedadam")


def settings() -> dict[str, dict[str, object]]:
    """Return what each row changes in the tiny config."""
    rows: dict[str, dict[str, object]] = {name: {"method__name": name} for name in METHODS}
    rows |= {f"{r}@{k}": {"method__name": r, "method__learner": k} for r in RULES for k in LEARNERS}
    return rows | OPTIONS


def digest(folder: Path) -> dict[str, str]:
    """Digest the tensors of a finished run's checkpoints, and its metrics without times."""
    run, found = Run(folder), {}
    for which in ("last", "final"):
        state = run.state(which)
        tensors = {f"w/{name}": each for name, each in state.server.weights.items()}
        tensors |= {f"s/{name}": each for name, each in state.server.state.items()}
        if which == "last":
            tensors |= {f"c/{k}/{name}": each for k, own in state.clients.items() for name, each in own.items()}
        hashed = hashlib.blake2b(digest_size=8)
        for name in sorted(tensors):
            hashed.update(name.encode() + tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found[which] = hashed.hexdigest()
    kept = [{key: record[key] for key in ("losses", "val", "test", "calibrated")} for record in run.history]
    found["history"] = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()
    return found


def measure(only: str) -> dict[str, dict[str, str]]:
    """Train all rows whose name contains a text and return their digests."""
    found = {}

    def note(row: str, run: Path) -> None:
        found[row] = digest(run)
        sys.stderr.write(f"{row}\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for row, changes in settings().items():
            if only in row:
                note(row, train(tiny(**SHORT, **changes), folder / str(len(found))).folder)
        for name in BY_PROCESSES:
            if only in (row := f"processes {name}"):
                config = tiny(**SHORT, method__name=name, engine="processes", workers=2)
                note(row, train(config, folder / str(len(found))).folder)
        for name in OVER_FLOWER:
            if only in (row := f"flower {name}"):
                own = folder / f"flower-{name}"
                own.mkdir()
                note(row, serve(simulated(), settings_for(tiny(**SHORT, method__name=name), own)))
    return found


def main() -> None:
    """Write digests, or compare them with those of before."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("_task_id", "_run_id", "_node_id"):  # Flower's messages want them
        setattr(TaskIdentity, name, 1)
    found = measure(given.only)
    if given.write:
        given.write.write_text(json.dumps(found, indent=1) + "\n")
    if given.compare:
        before = json.loads(given.compare.read_text())
        differing = [row for row in before if given.only in row and before[row] != found.get(row)]
        sys.stdout.write("".join(f"{row}: {before[row]} now {found.get(row)}\n" for row in differing))
        sys.stdout.write(f"{len(found) - len(differing)} of {len(found)} rows are as before\n")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
