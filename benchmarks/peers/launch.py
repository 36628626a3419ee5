"""Run each measurement in its own process, so that no row inherits another's threads, memory or settings."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from fednca.base.errors import RunFailedError
from fednca.config import Config
from fednca.methods.contract import Tensors

BENCHMARKS = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.1
LOG_LINES = 15  # shown when a row fails


@dataclass(frozen=True)
class Measured:
    """The answer of a row's process: its numbers, or why it was left out."""

    left_out: str = ""
    seconds: float = 0.0
    steps: int = 0  # of all clients in all rounds
    images: int = 0  # trained on
    load_before: float = 0.0  # the machine's load just before the clock started
    memory: int = 0  # peak in bytes: reserved on a CUDA device, else held by all processes of the row
    weights: Tensors | None = None


def launch(row: str, config: Config, threads: int, *, synthetic: bool = False, watch: bool = False) -> Measured:
    """Run a row; watch its memory only where its time does not matter, since watching costs time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(config.to_toml())
        command = [sys.executable, "-m", "peers.one", row, str(folder / "config.toml"), str(threads), name]
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        with (folder / "log.txt").open("w") as log:
            child = subprocess.Popen(
                command + ["--synthetic"] * synthetic,
                env=os.environ | {"PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                memory = watch_memory(child) if watch else 0
                child.wait()
            finally:
                child.kill()
        if child.returncode or not (folder / "outcome.json").exists():
            last = (folder / "log.txt").read_text().splitlines()[-LOG_LINES:]
            raise RunFailedError(f"the row '{row}' failed; the end of its log:\n" + "\n".join(last))
        answer = json.loads((folder / "outcome.json").read_text())
        weights = folder / "weights.safetensors"
        answer["weights"] = load_file(weights) if weights.exists() else None
        return Measured(**{"memory": memory} | answer)


def watch_memory(child: "subprocess.Popen[bytes]") -> int:
    """Return the peak memory of a process and its descendants until it ends, counting shared pages once."""
    largest = 0
    while child.poll() is None:
        largest = max(largest, sum(map(proportional_set, descendants(child.pid))))
        time.sleep(SAMPLE_SECONDS)
    return largest


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found.extend(children.get(each, []))
    return found


def proportional_set(pid: int) -> int:
    """Return a process's memory in bytes; a page shared by n processes counts 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended, or this is not Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
