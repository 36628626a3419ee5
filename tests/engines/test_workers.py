"""What goes wrong in worker processes is told, and none of them is ever left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import Stop, StopAfter, tiny
from parity import assert_same, assert_same_results, timeless

from fednca.base.errors import FedncaError, RunFailedError
from fednca.engines.eager import EagerEngine
from fednca.methods.contract import Rule
from fednca.runs import resume, train
from fednca.runs.callbacks import Callback
from fednca.runs.folder import locked

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


class TwoPartError(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, part: str, other: str) -> None:
        super().__init__(f"{part} {other}")


@pytest.mark.parametrize(
    ("thrown", "kind", "notes"),
    [
        (RunFailedError("a step failed"), RunFailedError, 0),
        (FedncaError("a step failed"), FedncaError, 0),
        (ValueError("a step failed"), ValueError, 1),
        (Stop("a step failed"), Stop, 1),
        (EOFError("a step failed"), EOFError, 1),
        (TwoPartError("a step", "failed"), RuntimeError, 1),
    ],
)
def test_an_error_in_a_worker_is_raised_here(fedavg, monkeypatch, thrown, kind, notes):
    place, server, engine = fedavg

    def fail_on_client_1(self, local):
        if local.client == 1:
            raise thrown
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(Rule, "penalties", fail_on_client_1)
        with pytest.raises(kind, match="a step failed") as caught:
            list(engine.train(1, [0, 1, 2], server, {}))
    assert type(caught.value) is kind
    assert len(getattr(caught.value, "__notes__", [])) == notes
    assert all("fail_on_client_1" in note for note in getattr(caught.value, "__notes__", []))
    assert multiprocessing.active_children() == []
    assert_same_results(engine.train(1, [0, 1, 2], server, {}), EagerEngine(place).train(1, [0, 1, 2], server, {}))


class KillWorker(Callback):
    """Kills a worker when the first client of a round is done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.killed: list[int] = []

    def on_client(self, number, client, losses) -> None:
        if number == self.number and not self.killed:
            self.killed = [multiprocessing.active_children()[0].pid]
            os.kill(self.killed[0], signal.SIGKILL)


def test_a_killed_worker_stops_the_run_and_resume_ends_it_as_if_nothing_had_been(tmp_path):
    config = tiny(method__name="scaffold", engine="processes", workers=2)
    killer = KillWorker(2)
    with pytest.raises(RunFailedError, match=r"killed, perhaps because memory ran out; .*`fednca resume"):
        train(config, tmp_path / "killed", [killer])
    assert killer.killed
    assert multiprocessing.active_children() == []
    found, expected = resume(tmp_path / "killed"), train(config.replace({"engine": "eager"}), tmp_path / "whole")
    assert_same(found.state("last").server.weights, expected.state("last").server.weights)
    assert_same(found.state("last").clients, expected.state("last").clients)
    assert timeless(found.history) == timeless(expected.history)


@pytest.mark.parametrize("task", ["train", "predict"])
def test_a_worker_killed_while_idle_is_noticed(fedavg, task):
    place, server, engine = fedavg
    engine.predict(server.weights, place.test, 16)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    use = {
        "train": lambda: list(engine.train(1, [0, 1, 2], server, {})),
        "predict": lambda: engine.predict(server.weights, place.test, 16),
    }
    with pytest.raises(RunFailedError, match="killed, perhaps because memory ran out; use fewer workers"):
        use[task]()


def test_a_stopped_run_leaves_no_worker(tmp_path):
    with pytest.raises(Stop):
        train(tiny(engine="processes", workers=2), tmp_path / "run", [StopAfter(1)])
    assert multiprocessing.active_children() == []


# Says who its workers are when client 1, the smallest, is done; the other workers are in the midst of a step.
SCRIPT = """
import multiprocessing, sys, time
from helpers import tiny
from fednca.runs.callbacks import Callback
from fednca.methods.contract import Rule
from fednca.base.randomness import GLOBAL
from fednca.runs import train

class Linger(Callback):
    def on_client(self, number, client, losses):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(60)

def linger(self, local):
    time.sleep(0 if local.client == 1 else 60)
    return {}

Rule.penalties = linger
train(tiny(method__name="fedavg", engine="processes", workers=3), sys.argv[1], [Linger()])
"""


@pytest.fixture
def lingering(tmp_path):
    """A run with three workers in another process, and the workers."""
    run = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    workers = [int(word) for word in run.stdout.readline().split()]
    yield run, workers
    for process in (run.pid, *workers):
        if is_running(process):
            os.kill(process, signal.SIGKILL)
    run.communicate()


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ignores(process: int, number: signal.Signals) -> bool:
    (mask,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_workers_leave_when_their_parent_is_killed_and_do_not_keep_its_folder_locked(lingering, tmp_path):
    run, workers = lingering
    assert len(workers) == 3
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    run.kill()
    run.wait(timeout=60)
    assert all(map(is_running, workers))
    with locked(tmp_path / "run"):
        pass
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.02)
    assert run.stderr.read() == ""


def test_ctrl_c_ends_the_workers_without_a_word_from_them(lingering):
    run, workers = lingering
    assert [ignores(worker, signal.SIGINT) for worker in workers] == [True] * 3
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, errors = run.communicate(timeout=60)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
    assert not any(map(is_running, workers))
