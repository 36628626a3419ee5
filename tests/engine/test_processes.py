"""Worker processes against the eager engine, bit for bit; and that none is ever left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import Stop, StopAfter, tiny

import fednca.engine.choose
import fednca.engine.processes
from fednca.callbacks import Callback
from fednca.engine.batches import Shard
from fednca.engine.eager import EagerEngine, Result
from fednca.engine.loop import Job
from fednca.engine.processes import ProcessEngine, forks_can_train
from fednca.errors import FedncaError, RunFailedError
from fednca.methods import create_method, method_class, method_names
from fednca.methods.base import Server
from fednca.methods.fedavg import FedAvg
from fednca.randomness import GLOBAL
from fednca.runfiles import locked
from fednca.runs import resume, train
from fednca.setup import build_job, build_model, cpu_threads, federate

FEDERATED = [name for name in method_names() if not method_class(name).centralized]
CLOCKS = {"seconds", "train_seconds", "samples_per_second"}


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    yield
    left = multiprocessing.active_children()
    for child in left:
        child.kill()
    assert left == []


def start(**changes) -> tuple[Job, Server]:
    config = tiny(**changes)
    method = create_method(config)
    federation = federate(config)
    model = build_model(config, method, federation.dataset.classes, pretrained="none")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainable = {name: weights[name] for name, weight in model.named_parameters() if weight.requires_grad}
    return build_job(config, method, federation, model, torch.device("cpu")), Server(
        weights, method.start_server(trainable)
    )


@pytest.fixture
def fedavg():
    """A job whose engine is the eager one, its server, and two workers for it."""
    job, server = start(method__name="fedavg")
    engine = ProcessEngine(job.engine, [job.val, job.test], 2)
    yield job, server, engine
    engine.close()


def in_order(results):
    return sorted(results, key=lambda result: result.update.client)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_same_results(found, expected):
    for one, other in zip(in_order(found), in_order(expected), strict=True):
        a, b = one.update, other.update
        assert (a.client, a.samples, a.steps, one.losses) == (b.client, b.samples, b.steps, other.losses)
        assert_same(a.weights, b.weights)
        assert_same(a.extra, b.extra)
        assert_same(one.state, other.state)


@pytest.mark.parametrize("name", FEDERATED)  # fedlgt among them, with dropout
def test_every_method_trains_as_in_one_process_with_any_number_of_workers(name):
    job, server = start(method__name=name)
    first = list(job.engine.train(1, [0, 1, 2], server, {}))
    later = job.method.aggregate(server, [result.update for result in first], [0.2, 0.3, 0.5])
    states = {result.update.client: result.state for result in first}
    second = list(job.engine.train(2, [0, 2], later, states))
    for workers in (1, 2, 3):
        engine = ProcessEngine(job.engine, [], workers)
        assert_same_results(engine.train(1, [0, 1, 2], server, {}), first)
        assert_same_results(engine.train(2, [0, 2], later, states), second)
        assert len(multiprocessing.active_children()) == workers
        engine.close()


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_every_precision_travels(precision):
    job, server = start(train__precision=precision, train__augment={"hflip": True, "rotate": 10.0})
    engine = ProcessEngine(job.engine, [job.test], 2)
    found = list(engine.train(1, [0, 1, 2], server, {}))
    probabilities = engine.predict(server.weights, job.test, 16)
    engine.close()
    assert_same_results(found, job.engine.train(1, [0, 1, 2], server, {}))
    assert_same(probabilities, job.engine.predict(server.weights, job.test, 16))


@pytest.mark.parametrize("name", ["fedcurv", "fedadam"])  # both servers keep more than they send
def test_workers_are_told_what_the_server_sends_and_nothing_else(name, monkeypatch):
    job, server = start(method__name=name)
    engine = ProcessEngine(job.engine, [], 2)
    told = []
    usual = fednca.engine.processes.Worker.send
    monkeypatch.setattr(
        fednca.engine.processes.Worker, "send", lambda self, message: (told.append(len(message)), usual(self, message))
    )
    list(engine.train(1, [0, 1, 2], server, {}))
    engine.close()
    kept, sent = (
        sum(tensor.nbytes for each in parts for tensor in each.values())
        for parts in ((server.weights, server.state), (server.weights, job.method.send(server)))
    )
    assert sent < max(told) < min(1.2 * sent, kept)


def test_workers_have_one_thread_where_their_parent_has_used_several(fedavg):
    job, server, engine = fedavg
    with cpu_threads(2):
        torch.ones(1000, 1000).sum()  # large enough for torch to start its threads
        found = list(engine.train(1, [0, 1, 2], server, {}))
    assert_same_results(found, job.engine.train(1, [0, 1, 2], server, {}))


@pytest.mark.parametrize(("name", "participation"), [("fednca-ml", 1.0), ("scaffold", 0.7), ("spherefed", 0.7)])
def test_a_run_ends_as_in_one_process(name, participation, tmp_path):
    config = tiny(method__name=name, train__participation=participation, evaluate__batch_size=16)
    expected = train(config, tmp_path / "eager")
    found = train(config.replace({"engine": "processes", "workers": 2}), tmp_path / "processes")
    for which in ("last", "best", "final"):
        a, b = found.state(which), expected.state(which)
        assert (a.round, a.best, a.clients.keys()) == (b.round, b.best, b.clients.keys())
        assert_same(a.server.weights, b.server.weights)
        assert_same(a.server.state, b.server.state)
        assert_same(a.clients, b.clients)
    assert timeless(found.history) == timeless(expected.history)
    assert found.results == expected.results


def timeless(history):
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in history]


@pytest.mark.parametrize(
    ("images", "batch_size", "at_work"),
    [(1, 16, 1), (16, 16, 1), (17, 16, 1), (18, 16, 2), (75, 16, 2), (75, 1000, 1), (1, 1, 1), (2, 1, 1), (5, 1, 2)],
)
def test_every_batch_is_predicted_as_in_one_process(fedavg, images, batch_size, at_work):
    job, server, _ = fedavg
    shard = Shard(job.test.store, job.test.rows[:images], job.test.labels[:images])
    engine = ProcessEngine(job.engine, [job.val, shard], 2)
    found = engine.predict(server.weights, shard, batch_size)
    assert len(multiprocessing.active_children()) == at_work
    engine.close()
    assert_same(found, job.engine.predict(server.weights, shard, batch_size))


def test_clients_and_strangers_are_predicted_too(fedavg):
    job, server, engine = fedavg
    stranger = Shard(job.test.store, job.test.rows[:20], job.test.labels[:20])
    for shard in (job.train[1], stranger):
        assert_same(engine.predict(server.weights, shard, 16), job.engine.predict(server.weights, shard, 16))


def test_what_is_left_unfinished_does_not_disturb_what_follows(fedavg):
    job, server, engine = fedavg
    expected = list(job.engine.train(1, [0, 1, 2], server, {}))
    unfinished = engine.train(1, [0, 1, 2], server, {})
    next(unfinished)
    assert_same(engine.predict(server.weights, job.test, 16), job.engine.predict(server.weights, job.test, 16))
    assert len(list(unfinished)) == 2

    unfinished = engine.train(1, [0, 1, 2], server, {})
    next(unfinished)
    unfinished.close()
    assert multiprocessing.active_children() == []
    assert_same_results(engine.train(1, [0, 1, 2], server, {}), expected)


def test_workers_start_while_another_thread_holds_the_lock_of_the_global_generators(fedavg):
    job, server, engine = fedavg
    found = []
    training = threading.Thread(target=lambda: found.extend(engine.train(1, [0, 1, 2], server, {})), daemon=True)
    with GLOBAL:
        training.start()
        training.join(0.5)  # it is about to start its workers, or has started them with a lock that nobody opens
    training.join(60)
    assert_same_results(found, job.engine.train(1, [0, 1, 2], server, {}))


def test_two_threads_train_side_by_side(fedavg):
    job, server, engine = fedavg
    other = ProcessEngine(job.engine, [], 2)
    found: dict[str, list[Result]] = {}

    def work(name, engine):
        found[name] = list(engine.train(1, [0, 1, 2], server, {}))

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in (("one", engine), ("other", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    expected = list(job.engine.train(1, [0, 1, 2], server, {}))
    assert_same_results(found["one"], expected)
    assert_same_results(found["other"], expected)


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
    job, server, engine = fedavg

    def fail_on_client_1(self, local):
        if local.client == 1:
            raise thrown
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "penalties", fail_on_client_1)
        with pytest.raises(kind, match="a step failed") as caught:
            list(engine.train(1, [0, 1, 2], server, {}))
    assert type(caught.value) is kind
    assert len(getattr(caught.value, "__notes__", [])) == notes
    assert all("fail_on_client_1" in note for note in getattr(caught.value, "__notes__", []))
    assert multiprocessing.active_children() == []
    assert_same_results(engine.train(1, [0, 1, 2], server, {}), job.engine.train(1, [0, 1, 2], server, {}))


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
    with pytest.raises(RunFailedError, match=r"killed, perhaps for want of memory; .*`fednca resume"):
        train(config, tmp_path / "killed", [killer])
    assert killer.killed
    assert multiprocessing.active_children() == []
    found, expected = resume(tmp_path / "killed"), train(config.replace({"engine": "eager"}), tmp_path / "whole")
    assert_same(found.state("last").server.weights, expected.state("last").server.weights)
    assert_same(found.state("last").clients, expected.state("last").clients)
    assert timeless(found.history) == timeless(expected.history)


@pytest.mark.parametrize("task", ["train", "predict"])
def test_a_worker_killed_while_idle_is_noticed(fedavg, task):
    job, server, engine = fedavg
    engine.predict(server.weights, job.test, 16)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    use = {
        "train": lambda: list(engine.train(1, [0, 1, 2], server, {})),
        "predict": lambda: engine.predict(server.weights, job.test, 16),
    }
    with pytest.raises(RunFailedError, match="killed, perhaps for want of memory; use fewer workers"):
        use[task]()


def test_a_stopped_run_leaves_no_worker(tmp_path):
    with pytest.raises(Stop):
        train(tiny(engine="processes", workers=2), tmp_path / "run", [StopAfter(1)])
    assert multiprocessing.active_children() == []


# Says who its workers are when client 1, the smallest, is done; the other workers are in the midst of a step.
SCRIPT = """
import multiprocessing, sys, time
from helpers import tiny
from fednca.callbacks import Callback
from fednca.methods.fedavg import FedAvg
from fednca.randomness import GLOBAL
from fednca.runs import train

class Linger(Callback):
    def on_client(self, number, client, losses):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(60)

def linger(self, local):
    time.sleep(0 if local.client == 1 else 60)
    return {}

FedAvg.penalties = linger
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


def engine_of(**changes):
    return start(**changes)[0].engine


def test_auto_takes_processes_for_several_clients_on_several_cores(monkeypatch):
    monkeypatch.setattr(fednca.engine.choose, "cores", lambda: 4)
    monkeypatch.setattr(fednca.engine.processes, "cores", lambda: 4)
    chosen = engine_of(engine="auto")
    assert isinstance(chosen, ProcessEngine)
    assert (chosen.workers, chosen.note) == (4, "engine: 4 processes, one for each core")
    assert engine_of(engine="auto", workers=3).note == "engine: 3 processes"


@pytest.mark.parametrize(
    ("changes", "hindrance"),
    [
        ({"method__name": "centralized", "workers": 2}, "only one client trains in a round"),
        ({"train__participation": 0.4, "workers": 2}, "only one client trains in a round"),
        ({"alone": True}, "there is only one core"),
        ({"daemon": True, "workers": 2}, "this process is a daemon"),
        ({"system": "Windows", "workers": 2}, "Windows has no safe way to fork"),
        ({"fork": "fails", "workers": 2}, "torch cannot train in a fork of this process"),
    ],
)
def test_what_processes_cannot_do_is_done_in_one_or_explained(changes, hindrance, monkeypatch):
    changes = dict(changes)
    if changes.pop("alone", False):
        monkeypatch.setattr(fednca.engine.choose, "cores", lambda: 1)
    if changes.pop("daemon", False):
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    if system := changes.pop("system", None):
        monkeypatch.setattr("platform.system", lambda: system)
    if changes.pop("fork", None):
        monkeypatch.setattr(fednca.engine.choose, "forks_can_train", lambda: False)
    assert isinstance(engine_of(engine="auto", **changes), EagerEngine)
    with pytest.raises(FedncaError, match=f"engine 'processes' cannot be used: {hindrance}.*leave `engine` out"):
        engine_of(engine="processes", **changes)


def die(tensor):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(tensor):
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


@pytest.mark.parametrize("backward", [refuse, die, lambda tensor: threading.Event().wait()])
def test_forks_that_cannot_train_are_found_out(backward, monkeypatch, capfd):
    assert forks_can_train()
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr(fednca.engine.processes, "TRIAL_SECONDS", 0.3)
    assert not forks_can_train()
    assert capfd.readouterr() == ("", "")
