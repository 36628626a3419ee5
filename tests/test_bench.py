"""Benches: rows, cells at once, interruptions, failures, and the table of mean and deviation."""

import io
import json
import os
import signal
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import TINY
from rich.console import Console

import fednca.crew
from fednca.bench import Bench, plan_bench
from fednca.cli import main
from fednca.crew import Crew, Watch, how_many_fit, train_bench
from fednca.engine.processes import fork
from fednca.errors import FedncaError, RunFailedError
from fednca.methods import method_names
from fednca.randomness import GLOBAL
from fednca.report.bench_view import BenchView, LiveView, PlainView
from fednca.report.tables import bench_table, mean_and_std
from fednca.rows import parse_row, parse_rows, parse_seeds
from fednca.runs import Run, train

SHORT = TINY | {"train.rounds": 2}


def plan(folder, *methods, seeds=(0,), **changes):
    overrides = SHORT | {name.replace("__", "."): value for name, value in changes.items()}
    return plan_bench("demo", overrides, methods, seeds, folder)


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


@pytest.mark.parametrize(
    ("text", "canonical", "folder"),
    [
        ("fedavg", "fedavg", "fedavg"),
        ("fedprox:mu=0.10", "fedprox:mu=0.1", "fedprox_mu-0.1"),
        ("fedprox:mu=1e-7", "fedprox:mu=1e-07", "fedprox_mu-1e-07"),
        ("fednca-ml:lambda2=1,lambda1=none", "fednca-ml:lambda1=none,lambda2=1", "fednca-ml_lambda1-none_lambda2-1"),
        ("fednca-ml:train-etf=True", "fednca-ml:train_etf=true", "fednca-ml_train_etf-true"),
        ("scaffold@fednca-ml", "scaffold@fednca-ml", "scaffold@fednca-ml"),
        (
            "fedprox@fednca-ml:learner.tau=0.5,mu=2",
            "fedprox@fednca-ml:mu=2,learner.tau=0.5",
            "fedprox@fednca-ml_mu-2_learner.tau-0.5",
        ),
    ],
)
def test_a_row_is_written_in_one_way_and_read_back(text, canonical, folder):
    row = parse_row(text)
    assert (row.text, row.folder) == (canonical, folder)
    assert parse_row(row.text) == row


def test_what_a_row_sets():
    assert parse_row("fedprox@fednca-ml:mu=2,learner.tau=0.5").overrides == {
        "method.name": "fedprox",
        "method.learner": "fednca-ml",
        "method.options": {"mu": 2.0},
        "method.learner_options": {"tau": 0.5},
    }


def test_a_rows_folder_is_one_name_whatever_its_options_hold():
    rows = parse_rows(["fedlgt:text=a/b.npz", "fedlgt:text=a-b.npz", "fedlgt:text=../b .npz"])
    names = [row.folder for row in rows]
    assert len(set(names)) == 3
    assert all(name.startswith("fedlgt_text-") and not set(name) & set("/\\ :") for name in names)


def test_all_is_every_method_and_the_released_variant():
    texts = [row.text for row in parse_rows(["all", "fedprox:mu=0.1", "fedavg"])]
    assert texts == [*texts[: len(method_names()) + 1], "fedprox:mu=0.1"]
    assert {*method_names(), "fednca-ml:variant=released"} == set(texts[:-1])
    assert [row.text for row in parse_rows(["fedavg,fedprox"])] == ["fedavg", "fedprox"]


@pytest.mark.parametrize("text", ["", "0", "00", "-1", "1.5", "three", "1,,2", ",1", "1 2"])
def test_seeds_that_are_none(text):
    with pytest.raises(FedncaError, match="--seeds should be how many"):
        parse_seeds(text)


def test_seeds():
    assert [parse_seeds(text) for text in ("1", "3", "0,", "7,4,7")] == [[0], [0, 1, 2], [0], [7, 4]]


def test_cells_at_once_are_what_they_are_alone(tmp_path, monkeypatch):
    both_begun = threading.Barrier(2, timeout=120)
    on_start = Watch.on_start

    def wait_for_the_other(watch, run, federation, rounds_done):
        on_start(watch, run, federation, rounds_done)
        both_begun.wait()

    monkeypatch.setattr(Watch, "on_start", wait_for_the_other)
    bench = plan(tmp_path / "bench", "fedlgt", "fednca-ml", seeds=[3], train__rounds=3)  # fedlgt has dropout
    outcome, diary = train_all(bench, at_once=2)
    assert (outcome.failed, outcome.stopped, diary.most_at_once) == ({}, False, 2)
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
    on_round, stop = Watch.on_round, Crew.stop

    def wait_until_told(watch, record, best):
        watch.tell(watch.crew.view.round, watch.cell, record)
        assert told.wait(60)
        monkeypatch.setattr(watch, "tell", lambda *_: None)
        on_round(watch, record, best)

    def stop_and_tell(crew):
        stop(crew)
        told.set()

    bench = plan(tmp_path / "bench", "fedavg", "fednca-ml", seeds=[0, 1], train__rounds=3)
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_round", wait_until_told)
        patch.setattr(Crew, "stop", stop_and_tell)
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
        watch.crew.stop()
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
    with pytest.raises(FedncaError, match=f"was begun with {sentence}"):
        plan(tmp_path, *methods, seeds=[0, 1], **changes)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_cell_of_another_setting_is_refused_by_its_own_config(tmp_path):
    bench = plan(tmp_path, "fedprox:mu=0.1")
    train_all(bench)
    path = bench.cells()[0].folder / "config.toml"
    path.write_text(path.read_text().replace("mu = 0.1", "mu = 0.2"))
    with pytest.raises(FedncaError, match=r"seed-0' was begun with method.options.mu = 0.2, not 0.1"):
        plan(tmp_path, "fedprox:mu=0.1")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FedncaError, match="holds other things than a bench"):
        plan(tmp_path, "fedavg")


def test_a_bench_in_use_is_refused(tmp_path):
    bench = plan(tmp_path, "fedavg")
    with fednca.crew.locked(tmp_path), pytest.raises(FedncaError, match="in use by another process"):
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

    monkeypatch.setattr("fednca.crew.train", full)
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
    monkeypatch.setattr("fednca.crew.own_stream", lambda device: nullcontext())
    monkeypatch.setattr(Watch, "on_start", note_the_second)
    monkeypatch.setattr(Watch, "on_round", wait_for_the_second)
    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml")
    diary = Diary(bench)
    assert Crew(bench.cells(), torch.device("cuda"), None, diary).work_off().failed == {}
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


METRICS = ("macro_auc", "macro_f1", "micro_auc", "micro_f1")


def write_results(cell, rng):
    """Make a finished run by hand, and return its five metrics."""
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.toml").write_text(cell.config.to_toml())
    values = rng.random(5)
    test = dict(zip(METRICS, values, strict=False))
    chosen = {"round": 2, "val": {}, "test": test, "calibrated": {"test": {"macro_f1": values[4]}}}
    wrong = {"round": 1, "val": {}, "test": dict.fromkeys(METRICS, 0.0), "calibrated": {"test": {"macro_f1": 0.0}}}
    (cell.folder / "results.json").write_text(json.dumps({"val": chosen, "paper": wrong, "last": wrong}))
    return values


def test_the_table_has_mean_and_sample_deviation_of_the_round_chosen_on_validation(tmp_path, capsys):
    rng = np.random.default_rng(0)
    config = tmp_path / "tiny.toml"
    bench = plan(tmp_path / "bench", "fedavg", "fedlgt", "fedprox:mu=0.1", seeds=[0, 1, 2])
    config.write_text(bench.config.to_toml())
    values = {}
    for cell in bench.cells():
        if cell.row.text != "fedlgt" or cell.seed == 1:
            values.setdefault(cell.row.text, []).append(write_results(cell, rng))
    bench.save()
    assert main(["bench", str(config), "--methods", "fedavg", "fedprox:mu=0.1", "--out", str(bench.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in ("fedavg", "fedprox:mu=0.1"):
        seen = np.array(values[row]) * 100
        cells = [f"{m:.1f}±{s:.1f}" for m, s in zip(seen.mean(0), seen.std(0, ddof=1), strict=True)]
        line = next(line for line in lines if line.split()[:1] == [row.partition(":")[0]])
        assert line.split()[1:] == ["0", "1", "2", *cells]
    (single,) = np.array(values["fedlgt"]) * 100
    line = next(line for line in lines if line.split()[:1] == ["fedlgt"])
    assert line.split()[1:] == ["1", *(f"{value:.1f}±–" for value in single)]
    assert any(line.startswith("fedlgt: text table: ") for line in lines)  # what must be said of its results
    assert any(line.split() == ["mu=0.1"] for line in lines)


def test_mean_and_deviation_of_the_values_there_are():
    values = np.random.default_rng(1).random(5)
    assert mean_and_std([*values, None]) == pytest.approx((values.mean(), values.std(ddof=1)), rel=1e-12)
    assert mean_and_std([0.25, None]) == (0.25, None)
    assert mean_and_std([None]) is None


def test_a_row_without_results_shows_dashes():
    console = Console(file=io.StringIO(), width=100)
    console.print(bench_table("nothing yet", {"fedavg": {}}))
    assert console.file.getvalue().splitlines()[5].split() == ["fedavg", *"––––––"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


ROUND = {"val": {"macro_f1": 0.5}}
REACHED = {"macro_auc": 0.91, "macro_f1": None}


def test_the_time_left_is_that_of_the_rounds_left_at_the_pace_so_far(tmp_path, clock):
    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml", train__rounds=10)
    one, two, three = bench.cells()
    view = BenchView(Console(file=io.StringIO()), bench.cells())
    view.begin(one, 4)
    assert view.times() == "0:00:00"
    for number in (5, 6):
        clock[0] += 30
        view.round(one, {"round": number} | ROUND)
    assert view.times() == "0:01:00, 0:12:00 left"  # 4 + 10 + 10 rounds of 30 seconds
    clock[0] += 10
    assert view.times() == "0:01:10, 0:11:50 left"
    view.begin(two, 0)
    view.fail(two, "no reason")
    assert view.times() == "0:01:10, 0:06:50 left"
    view.begin(three, 0)
    view.finish(three, REACHED)
    assert view.count() == "1 of 3 runs done"


def test_plain_lines_tell_of_beginnings_and_ends_and_no_round(tmp_path, clock):
    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml")
    one, two, three = bench.cells()
    console = Console(file=io.StringIO(), width=40)
    view = PlainView(console, bench.cells())
    for _ in range(2):
        view.note("engine: two horses")
    view.prepare("digits train", 1, 2)
    view.begin(one, 0)
    view.begin(two, 1)
    clock[0] = 60.0
    view.round(one, {"round": 1} | ROUND)
    view.finish(one, REACHED)
    view.fail(two, "no [reason]")
    view.begin(three, 0)
    assert console.file.getvalue().splitlines() == [
        "engine: two horses",
        "fedavg, seed 0: begins | 0 of 3 runs done | 0:00:00",
        "fedprox, seed 0: goes on after round 1 | 0 of 3 runs done | 0:00:00",
        "fedavg, seed 0: macro-AUC 91.0 macro-F1 – | 1 of 3 runs done | 0:01:00, 0:04:00 left",
        "fedprox, seed 0: failed, no [reason] | 1 of 3 runs done | 0:01:00, 0:03:00 left",
        "fednca-ml, seed 0: begins | 1 of 3 runs done | 0:01:00, 0:03:00 left",
    ]


def test_the_live_picture_shows_what_runs_and_what_ended_last(tmp_path, clock):
    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml", seeds=range(3))
    cells = bench.cells()
    view = LiveView(Console(file=io.StringIO(), width=70, force_terminal=True), cells)
    with view:
        for cell in cells[:6]:
            view.begin(cell, 0)
            view.finish(cell, REACHED)
        view.begin(cells[6], 0)
        view.fail(cells[6], "a reason that is too long for a line " * 3)
        view.begin(cells[7], 0)
        clock[0] = 5.0
        view.round(cells[7], {"round": 1} | ROUND)
        shown = Console(file=io.StringIO(), width=70)
        shown.print(view.picture())
    lines = shown.file.getvalue().splitlines()
    assert "6 of 9 runs done 0:00:05" in lines[0]
    assert lines[1].rstrip().split("  ") == ["", "fedprox, seed 2", "round 1/2", "val macro-F1 50.0"]
    assert [line.split(":")[0].strip() for line in lines[2:]] == [cell.name for cell in cells[2:7]]
    assert lines[2].strip() == "fednca-ml, seed 0: macro-AUC 91.0 macro-F1 –"
    assert lines[-1].endswith("…")
