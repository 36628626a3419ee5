"""The rows of the table by name. A row that cannot run raises a FedncaError that says why."""

import importlib.util
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from fednca.base.errors import FedncaError, RunFailedError
from fednca.data.processes import cores
from peers import limit, ours, parcel, plain
from peers.work import Outcome, Work, refuse_what_peers_cannot


@dataclass(frozen=True)
class Row:
    """A row: its label, how it trains, and whether several threads in one process could help it."""

    label: str
    run: Callable[[Work], Outcome]
    threaded: bool = False

    def threads(self, device: torch.device) -> list[int]:
        """Return the numbers of threads to try, the better of which counts; on a GPU one is enough."""
        return sorted({1, cores()}) if self.threaded and device.type == "cpu" else [1]


def need(package: str) -> None:
    """Refuse a row whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise FedncaError(f"{package} is not installed; `pip install -c constraints.txt -e '.[bench]'` adds it")


def need_cpu(work: Work, what: str) -> None:
    """Refuse a row that is set up for a CPU only on another device."""
    if work.device.type != "cpu":
        raise FedncaError(f"{what} is set up for a CPU only; use --set device=cpu")


def pfl(work: Work) -> Outcome:
    """Train with pfl in this process."""
    need("pfl")
    refuse_what_peers_cannot(work.config)
    os.environ["PFL_PYTORCH_DEVICE"] = str(work.device)
    from peers import pfl_peer

    return pfl_peer.run(work)


def need_pfl_workers(work: Work) -> None:
    """Refuse pfl in several processes where that is impossible or of no help."""
    need("pfl")
    need_cpu(work, "pfl in several processes")
    refuse_what_peers_cannot(work.config)
    if cores() == 1:
        raise FedncaError("pfl in several processes needs several cores")
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pfl_torchrun(work: Work) -> Outcome:
    """Train with pfl in one process per core, started by `torchrun` as its documentation says."""
    need_pfl_workers(work)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parcel.save(work, folder)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cores()}"]
        began = time.perf_counter()
        subprocess.run([*launcher, "-m", "peers.pfl_worker", name], check=True)
        ended = float((folder / "ended.txt").read_text())  # all processes of a machine share one clock
        return Outcome(ended - began, load_file(folder / "final.safetensors"))


def pfl_forked(work: Work) -> Outcome:
    """Train with pfl in one process per core, forked from this one, which start faster than `torchrun`'s."""
    need_pfl_workers(work)
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port}" for port in free_ports(cores()))
    began = time.perf_counter()
    # pfl looks for other workers only in processes with this name
    start = multiprocessing.get_context("fork").Process
    others = [start(target=_pfl_worker, args=(work, rank, began), name="MainProcess") for rank in range(1, cores())]
    for other in others:
        other.start()
    outcome = _pfl_worker(work, 0, began)
    for other in others:
        other.join()
        if other.exitcode:
            raise RunFailedError(f"a worker of pfl ended with exit code {other.exitcode}")
    return outcome


def _pfl_worker(work: Work, rank: int, began: float) -> Outcome:
    os.environ["PFL_WORKER_RANK"] = str(rank)
    from multiprocess import active_children

    from peers import pfl_peer  # connects to the other workers

    outcome = pfl_peer.run(work, began)
    for child in active_children():  # pfl's sampler process, which a forked worker would leave behind
        child.terminate()
    return outcome


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def flower(work: Work) -> Outcome:
    """Train with Flower's simulation."""
    need("flwr")
    need("ray")
    need_cpu(work, "Flower's simulation")
    refuse_what_peers_cannot(work.config)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    from peers import flower_peer

    return flower_peer.run(work, cores())


ROWS = {
    "plain": Row("plain loop", plain.run, threaded=True),
    "pfl": Row("pfl", pfl, threaded=True),
    "pfl-torchrun": Row("pfl, torchrun", pfl_torchrun),
    "pfl-forked": Row("pfl, forked", pfl_forked),
    "flower": Row("Flower simulation", flower),
    "eager": Row("fednca eager", lambda work: ours.run(work, "eager"), threaded=True),
    "processes": Row("fednca processes", lambda work: ours.run(work, "processes")),
    "graphs": Row("fednca graphs", lambda work: ours.run(work, "graphs")),
    "limit": Row("limit", limit.run),
}
