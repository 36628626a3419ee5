"""Benches: cells at once, interruptions, failures, and what is refused."""

import io
import json
import os
import signal
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from helpers import plan
from rich.console import Console

import fednca.bench.local
from fednca.base.errors import FedncaError, RunFailedError
from fednca.base.randomness import GLOBAL
from fednca.bench.cells import Bench
from fednca.bench.local import LocalExecutor, Watch, how_many_fit, train_bench
from fednca.bench.view import BenchView
from fednca.engines.processes import fork
from fednca.runs import Run, train


class Diary(BenchView):
    """Notes what it hears of."""

    def __init__(self, bench):
        super().__init__(Console(file=io.StringIO()), bench.cells())
        self.heard, self.most_at_once = [], 0

    def begin(self, cell, rounds_done):
        super().begin(cell, rounds_done)
        self.heard.append(("begin", cell.name, rounds_done))
        self.most_at_once = max(self.most_at_once, len(self.rounds))

    def finish(self, cell, metrics):
        super().finish(cell, metrics)
        self.heard.append(("finish", cell.name))

    def begun(self):
        return [event[1:] for event in self.heard if event[0] == "begin"]


def train_all(bench, at_once=None):
    diary = Diary(bench)
    return train_bench(bench, diary, at_once), diary


def timeless(run):
    clocks = {"seconds", "train_seconds", "samples_per_second"}
    return [{key: value for key, value in record.items() if key not in clocks} for record in run.history]


def assert_as_alone(cell, folder):
    """Compare a cell with the same run trained by itself, bit for bit."""
    found, alone = Run(cell.folder), train(cell.config, folder / cell.row.folder / str(cell.seed))
    for which in ("last", "best", "final"):
        weights = alone.state(which).server.weights
        torch.testing.assert_close(found.state(which).server.weights, weights, rtol=0, atol=0)
    assert timeless(found) == timeless(alone)
    assert found.results == alone.results
    assert found.config == alone.config


def test_folders_of_rows_are_called_as_in_older_benches(tmp_path):
    rows = plan(tmp_path, "fedprox:mu=0.5,head=mlp", "spherefed:ridge=0.01,target=shifted", "fedavg@spherefed").rows
    names = ["fedprox_head-mlp_mu-0.5", "spherefed_target-shifted_ridge-0.01", "fedavg@spherefed"]
    assert [row.folder for row in rows] == names


def test_cells_at_once_are_what_they_are_alone(tmp_path, monkeypatch):
    both_begun = threading.Barrier(2, timeout=120)
    on_start, usual, intervals = Watch.on_start, sys.getswitchinterval(), []

    def wait_for_the_other(watch, run, federation, rounds_done):
        on_start(watch, run, federation, rounds_done)
        intervals.append(sys.getswitchinterval())
        both_begun.wait()

    monkeypatch.setattr(Watch, "on_start", wait_for_the_other)
    bench = plan(tmp_path / "bench", "fedlgt", "fednca-ml", seeds=[3], train__rounds=3)  # fedlgt has dropout
    outcome, diary = train_all(bench, at_once=2)
    assert (outcome.failed, outcome.stopped, diary.most_at_once) == ({}, False, 2)
    assert max(intervals) < usual / 10  # none of them waits long for another
    assert sys.getswitchinterval() == usual
    for cell in bench.cells():
        assert_as_alone(cell, tmp_path / "alone")


def test_cells_whose_engine_forks_are_what_they_are_alone(tmp_path):
    bench = plan(tmp_path / "bench", "fedlgt", "centralized", "fedavg", engine="auto", workers=2)
    assert train_all(bench, at_once=3)[0].failed == {}
    for cell in bench.cells():
        assert_as_alone(cell, tmp_path / "alone")


def test_a_fork_can_use_the_generators_that_another_thread_was_using():
    held, release = threading.Event(), threading.Event()

    def use_generators():
        with GLOBAL:
            held.set()
            release.wait(0.3)

    def child():
        os._exit(0 if GLOBAL.acquire(timeout=10) else 1)

    user = threading.Thread(target=use_generators)
    user.start()
    held.wait()
    process = fork(child)
    process.join(60)
    user.join()
    assert process.exitcode == 0
    assert GLOBAL.acquire(timeout=1)  # and so can this process
    GLOBAL.release()


def test_a_second_call_skips_what_is_done_and_adds_what_is_new(tmp_path):
    first = plan(tmp_path, "fedavg", seeds=[1])
    train_all(first)
    (done,) = first.cells()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in done.folder.iterdir()}
    second = plan(tmp_path, "fedprox:mu=0.1", "fedavg", seeds=[1, 0])
    _, diary = train_all(second)
    assert diary.begun() == [("fedprox:mu=0.1, seed 1", 0), ("fedprox:mu=0.1, seed 0", 0), ("fedavg, seed 0", 0)]
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in done.folder.iterdir()} == before
    assert Run(second.cells()[0].folder).config.method.options["mu"] == 0.1
    recorded = Bench.read(tmp_path)
    assert ([row.text for row in recorded.rows], recorded.seeds) == (["fedavg", "fedprox:mu=0.1"], [0, 1])
    note = json.loads((tmp_path / "bench.json").read_text())
    assert (note["preset"], note["overrides"]["train.rounds"]) == ("demo", 2)
    assert {row: sorted(runs) for row, runs in recorded.runs().items()} == {"fedavg": [0, 1], "fedprox:mu=0.1": [0, 1]}
    assert train_all(second)[1].heard == []


class Interrupting(Diary):
    """Sends Ctrl-C when a round is told."""

    def round(self, cell, record):
        super().round(cell, record)
        if self.rounds_trained == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_with_a_round_and_the_same_call_goes_on(tmp_path, monkeypatch):
    told = threading.Event()
    on_round, stop = Watch.on_round, LocalExecutor.stop

    def wait_until_told(watch, record, best):
        watch.tell(watch.executor.view.round, watch.cell, record)
        assert told.wait(60)
        monkeypatch.setattr(watch, "tell", lambda *_: None)
        on_round(watch, record, best)

    def stop_and_tell(executor):
        stop(executor)
        told.set()

    bench = plan(tmp_path / "bench", "fedavg", "fednca-ml", seeds=[0, 1], train__rounds=3)
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_round", wait_until_told)
        patch.setattr(LocalExecutor, "stop", stop_and_tell)
        outcome = train_bench(bench, Interrupting(bench))
    assert (outcome.stopped, outcome.failed) == (True, {})
    assert signal.getsignal(signal.SIGINT) is before
    assert [cell.begun for cell in bench.cells()] == [True, False, False, False]
    assert Run(bench.cells()[0].folder).state("last").round == 1
    outcome, diary = train_all(bench)
    assert (outcome.stopped, outcome.failed) == (False, {})
    expected = [("fedavg, seed 0", 1), ("fednca-ml, seed 0", 0), ("fedavg, seed 1", 0), ("fednca-ml, seed 1", 0)]
    assert diary.begun() == expected
    assert_as_alone(bench.cells()[0], tmp_path / "alone")


def test_ctrl_c_twice_gives_up_the_round(tmp_path, monkeypatch):
    bench = plan(tmp_path, "fedavg", "fedprox")
    on_client = Watch.on_client

    def interrupted_twice(watch, *facts):
        watch.executor.stop()
        on_client(watch, *facts)

    monkeypatch.setattr(Watch, "on_client", interrupted_twice)
    outcome, _ = train_all(bench)
    assert outcome.stopped
    assert Run(bench.cells()[0].folder).state("last").round == 0
    assert not bench.cells()[1].begun


def test_a_cell_that_was_killed_while_its_folder_was_made(tmp_path):
    bench = plan(tmp_path, "fedavg")
    (cell,) = bench.cells()
    cell.folder.mkdir(parents=True)
    for name in (".lock", "config.toml.partial"):
        (cell.folder / name).write_text("")
    bench.save()
    assert train_all(bench)[0].failed == {}
    assert cell.finished


@pytest.mark.parametrize(
    ("changes", "methods", "sentence"),
    [
        ({"train__lr": 2e-3}, ["fedavg"], r"train.lr = 0.001, not 0.002"),
        ({"train__lr": 2e-3}, ["fedprox"], r"train.lr = 0.001, not 0.002"),  # though nothing of it is there
        ({"evaluate__every": 2}, ["fedprox", "fedavg"], r"evaluate.every = 1, not 2"),
        ({"data__options": {}}, ["fedavg"], r"data.options.train_singles = 12, not"),
    ],
)
def test_other_settings_than_before_are_refused(tmp_path, changes, methods, sentence):
    train_all(plan(tmp_path, "fedavg"))
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(FedncaError, match=f"was started with {sentence}"):
        plan(tmp_path, *methods, seeds=[0, 1], **changes)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_cell_of_another_setting_is_refused_by_its_own_config(tmp_path):
    bench = plan(tmp_path, "fedprox:mu=0.1")
    train_all(bench)
    path = bench.cells()[0].folder / "config.toml"
    path.write_text(path.read_text().replace("mu = 0.1", "mu = 0.2"))
    with pytest.raises(FedncaError, match=r"seed-0' was started with method.options.mu = 0.2, not 0.1"):
        plan(tmp_path, "fedprox:mu=0.1")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FedncaError, match="holds other things than a bench"):
        plan(tmp_path, "fedavg")


def test_a_bench_in_use_is_refused(tmp_path):
    bench = plan(tmp_path, "fedavg")
    with fednca.bench.local.locked(tmp_path), pytest.raises(FedncaError, match="in use by another process"):
        train_all(bench)


def test_a_failed_cell_costs_no_other_and_is_tried_again(tmp_path, monkeypatch):
    def fail_once(watch, record, best):
        if watch.cell.row.text == "fedavg":
            raise RunFailedError("the disk is full")
        if watch.cell.row.text == "fedprox":
            raise ZeroDivisionError("a bug")

    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml")
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_round", fail_once)
        outcome, _ = train_all(bench)
    trace = tmp_path / "fedprox/seed-0-error.txt"
    assert list(outcome.failed) == ["fedavg, seed 0", "fedprox, seed 0"]
    assert outcome.failed["fedavg, seed 0"].startswith("the disk is full (`fednca resume")
    assert outcome.failed["fedprox, seed 0"] == f"ZeroDivisionError: a bug (see '{trace}')"
    assert "fail_once" in trace.read_text()
    assert [cell.finished for cell in bench.cells()] == [False, False, True]
    assert train_all(bench)[0].failed == {}
    assert not trace.exists()
    assert all(cell.finished for cell in bench.cells())


def test_a_full_gpu_is_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("fednca.bench.local.train", full)
    outcome, _ = train_all(plan(tmp_path, "fedavg"))
    assert outcome.failed["fedavg, seed 0"].startswith("the GPU's memory is full; use a smaller --at-once")


@pytest.mark.parametrize(
    ("cells", "free", "taken", "expected"),
    [(12, 100, 10, 4), (12, 100, 45, 3), (12, 100, 46, 2), (12, 100, 91, 1), (12, 0, 10, 1), (2, 100, 1, 2)],
)
def test_how_many_fit(cells, free, taken, expected):
    assert how_many_fit(cells, free, taken) == expected
    others = expected - 1
    assert others * taken <= 0.9 * free
    assert expected in {cells, 4} or (others + 1) * taken > 0.9 * free


def test_the_first_round_on_a_gpu_shows_how_many_fit(tmp_path, monkeypatch):
    asked = iter([100 << 30, 60 << 30])  # free before the first cell, and after its first round
    second_begun = threading.Event()
    on_start, on_round = Watch.on_start, Watch.on_round

    def note_the_second(watch, *facts):
        on_start(watch, *facts)
        if watch.cell.row.text == "fedprox":
            second_begun.set()

    def wait_for_the_second(watch, record, best):
        on_round(watch, record, best)
        if watch.cell.row.text == "fedavg":
            assert second_begun.wait(120)

    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (next(asked), 140 << 30))
    monkeypatch.setattr("fednca.bench.local.own_stream", lambda device: nullcontext())
    monkeypatch.setattr(Watch, "on_start", note_the_second)
    monkeypatch.setattr(Watch, "on_round", wait_for_the_second)
    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml")
    diary = Diary(bench)
    assert LocalExecutor(bench.cells(), torch.device("cuda"), None, diary).work_off().failed == {}
    assert "2 runs at once: one takes 40.0 GiB" in diary.console.file.getvalue()
    assert diary.most_at_once == 2
    assert all(cell.finished for cell in bench.cells())


@pytest.mark.gpu
def test_cells_at_once_on_a_gpu_are_what_they_are_alone(tmp_path):
    changes = {"device": "cuda", "engine": "auto", "train__precision": "bf16", "train__rounds": 6}
    bench = plan(tmp_path / "bench", "fedavg", "fednca-ml", "fedlgt", "scaffold", "centralized", "fedprox", **changes)
    outcome, diary = train_all(bench)
    assert outcome.failed == {}
    assert diary.most_at_once > 1  # so small a model leaves room for more
    for cell in bench.cells():
        assert_as_alone(cell, tmp_path / "alone")
