"""What is seen of a bench: the table of mean and deviation, plain lines and the live picture."""

import io
import json

import numpy as np
import pytest
from helpers import plan
from rich.console import Console

from fednca.bench.view import BenchView, LiveView
from fednca.cli.app import main
from fednca.engines.contract import Judgement
from fednca.report.tables import mean_and_std
from fednca.runs.history import Round

METRICS = ("macro_auc", "macro_f1", "micro_auc", "micro_f1")


def write_results(cell, rng):
    """Make a finished run by hand, and return its six metrics."""
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.toml").write_text(cell.config.to_toml())
    values = rng.random(6)
    test = dict(zip(METRICS, values, strict=False))
    chosen = {
        "round": 2,
        "val": {},
        "test": test,
        "calibrated": {"test": dict(zip(("macro_f1", "micro_f1"), values[4:], strict=True))},
    }
    wrong = {
        "round": 1,
        "val": {},
        "test": dict.fromkeys(METRICS, 0.0),
        "calibrated": {"test": dict.fromkeys(METRICS, 0.0)},
    }
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
        line = next(line for line in lines if line.split()[:1] == [row])
        assert line.split()[1:] == ["3", *cells]
    (single,) = np.array(values["fedlgt"]) * 100
    line = next(line for line in lines if line.split()[:1] == ["fedlgt"])
    assert line.split()[1:] == ["1", "of", "3", *(f"{value:.1f}" for value in single)]
    assert any(line.startswith("fedlgt: text table: ") for line in lines)  # what must be said of its results


def test_mean_and_deviation_of_the_values_there_are():
    values = np.random.default_rng(1).random(5)
    assert mean_and_std([*values, None]) == pytest.approx((values.mean(), values.std(ddof=1)), rel=1e-12)
    assert mean_and_std([0.25, None]) == (0.25, None)
    assert mean_and_std([None]) is None


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


REACHED = {"macro_auc": 0.91, "macro_f1": None}


def finished(number):
    """A round that reached a macro-F1 of one half on validation images."""
    return Round(number, {}, {}, [], 1.0, 1.0, judgement=Judgement({"val": {"macro_f1": 0.5}}))


def test_the_time_left_is_that_of_the_rounds_left_at_the_pace_so_far(tmp_path, clock):
    bench = plan(tmp_path, "fedavg", "fedprox", "fednca-ml", train__rounds=10)
    one, two, three = bench.cells()
    view = BenchView(Console(file=io.StringIO()), bench.cells())
    view.begin(one, 4)
    assert view.times() == "0:00:00"
    for number in (5, 6):
        clock[0] += 30
        view.round(one, finished(number))
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
    view = BenchView(console, bench.cells())
    for _ in range(2):
        view.note("engine: two horses")
    view.prepare("digits train", 1, 2)
    view.begin(one, 0)
    view.begin(two, 1)
    clock[0] = 60.0
    view.round(one, finished(1))
    view.finish(one, REACHED)
    view.fail(two, "no [reason]")
    view.begin(three, 0)
    assert console.file.getvalue().splitlines() == [
        "engine: two horses",
        "fedavg, seed 0: starts | 0 of 3 runs done | 0:00:00",
        "fedprox, seed 0: resumes after round 1 | 0 of 3 runs done | 0:00:00",
        "fedavg, seed 0: macro-AUC 91.0 macro-F1 – | 1 of 3 runs done | 0:01:00, 0:04:00 left",
        "fedprox, seed 0: failed, no [reason] | 1 of 3 runs done | 0:01:00, 0:03:00 left",
        "fednca-ml, seed 0: starts | 1 of 3 runs done | 0:01:00, 0:03:00 left",
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
        view.round(cells[7], finished(1))
        shown = Console(file=io.StringIO(), width=70)
        shown.print(view.picture())
    lines = shown.file.getvalue().splitlines()
    assert "6 of 9 runs done 0:00:05" in lines[0]
    assert lines[1].rstrip().split("  ") == ["", "fedprox, seed 2", "round 1/2", "val macro-F1 50.0"]
    assert [line.split(":")[0].strip() for line in lines[2:]] == [cell.name for cell in cells[2:7]]
    assert lines[2].strip() == "fednca-ml, seed 0: macro-AUC 91.0 macro-F1 –"
    assert lines[-1].endswith("…")
