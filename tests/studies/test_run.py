"""Working off a plan of tiny runs: what a stop in between leaves, and what a later call makes of it."""

import json
import subprocess
import threading
import time
from dataclasses import dataclass

import pytest
import run
from helpers import tiny
from plan import CALIBRATION, Entry

from fednca.bench.local import Outcome
from fednca.config import Config
from fednca.runs import Run

DONE, STOPPED = Outcome({}, stopped=False), Outcome({}, stopped=True)


@dataclass(frozen=True)
class TinyEntry(Entry):
    """A run of the demo's kind in place of a setting's."""

    def config(self) -> Config:
        return tiny(train__rounds=self.rounds, seed=self.seed)


@pytest.fixture(autouse=True)
def _own_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RUNS", tmp_path / "runs")


def entries(rounds):
    return [TinyEntry("dermamnist-0.1", "fedavg", 0, seed, rounds) for seed in (0, 1)]


def record_of(folder, entry):
    found = json.loads((folder / entry.path).read_text())
    return {key: found[key] for key in ("results", "curves", "losses")}


class AfterOneRound:
    """An alarm that goes off when a run tells of its first round."""

    def __init__(self, seconds, action):
        self.action = action

    def start(self):
        run.Keeper.round = lambda view, cell, record: self.action()

    def cancel(self):
        del run.Keeper.round


def test_runs_that_were_stopped_go_on_to_the_same_records(tmp_path, monkeypatch):
    planned, whole, parts = entries(12), tmp_path / "whole", tmp_path / "parts"
    assert run.work_off(planned, whole, "abc", time.monotonic() + 600, 1) == DONE
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Timer", AfterOneRound)
        assert run.work_off(planned, parts, "abc", time.monotonic() + 600, 1) == STOPPED
    assert not list(parts.rglob("*.json"))
    assert 0 < len(Run(run.RUNS / planned[0].path.with_suffix("")).history) < 12
    assert run.work_off(planned, parts, "abc", time.monotonic() + 600, 1) == DONE
    for entry in planned:
        assert record_of(parts, entry) == record_of(whole, entry)
    assert record_of(whole, planned[0]) != record_of(whole, planned[1])
    assert not list(run.RUNS.rglob("*.safetensors"))  # what a record tells is not kept twice


def test_what_was_begun_ends_after_the_last_beginning(tmp_path, monkeypatch):
    alarms, begun = {}, []

    class Alarm:
        """Goes off when it is told to."""

        def __init__(self, seconds, action):
            alarms[round(seconds, -2)] = action

        def start(self):
            pass

        cancel = start

    def begin(view, cell, rounds_done):
        begun.append(cell)
        alarms[300]()

    monkeypatch.setattr(threading, "Timer", Alarm)
    monkeypatch.setattr(run.Keeper, "begin", begin)
    now, planned = time.monotonic(), entries(2)
    assert run.work_off(planned, tmp_path / "records", "abc", now + 600, 1, now + 300) == DONE
    assert len(begun) == 1
    assert [(tmp_path / "records" / entry.path).exists() for entry in planned] == [True, False]


def test_no_run_ends_when_the_time_is_up(tmp_path):
    assert run.work_off(entries(12), tmp_path / "records", "abc", time.monotonic(), 1) == STOPPED
    assert not (tmp_path / "records").exists()


def test_what_fails_is_told_and_has_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(TinyEntry, "config", lambda self: tiny(train__rounds=1, train__lr=1e30))
    monkeypatch.setattr(run, "plan", lambda records: entries(1)[:1])
    monkeypatch.setattr(run, "voc", lambda records: [])
    with pytest.raises(SystemExit) as stop:
        run.main(["--records", str(tmp_path), "--commit", "abc"])
    assert stop.value.code == 1
    assert not list(tmp_path.glob("dermamnist*"))


def test_what_cannot_be_begun_is_a_sentence(tmp_path, monkeypatch, capsys):
    records, git = tmp_path / "records", tmp_path / "no-git"
    entry = entries(1)[0]
    (records / entry.path).parent.mkdir(parents=True)
    (records / entry.path).write_text("{")
    wrong = {"is damaged": ["--commit", "abc"], "whole number": ["--at-once", "0"], "--commit": []}
    for words, arguments in wrong.items():
        if words == "--commit":
            monkeypatch.setenv("PATH", str(git))
        with pytest.raises(SystemExit) as stop:
            run.main(["--records", str(records), *arguments])
        assert stop.value.code == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_commit_is_that_of_the_code_wherever_it_is_called_from(tmp_path, monkeypatch):
    for name in ("code", "elsewhere"):
        git = ["git", "-C", str(tmp_path / name), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "init", "--quiet", tmp_path / name], check=True)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", name], check=True)
    branch = next((tmp_path / "code" / ".git" / "refs" / "heads").iterdir())
    monkeypatch.setattr(run, "__file__", str(tmp_path / "code" / "run.py"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run.commit_of_this() == branch.read_text().strip()


def test_nothing_left_is_said(tmp_path, capsys):
    run.main(["--records", str(tmp_path), "--only", "no-such-setting", "--commit", "abc"])
    assert "nothing to train" in capsys.readouterr().out


def test_only_what_has_no_record_is_left(tmp_path):
    left = run.left(tmp_path, "", [])
    assert set(CALIBRATION) <= set(left)
    assert {entry.setting for entry in run.left(tmp_path, "dermamnist-0.5", [])} == {"dermamnist-0.5"}
    assert all(entry.row != "fedcurv" for entry in run.left(tmp_path, "nih", ["fedcurv"]))
    planned, folder = entries(1)[0], tmp_path / "records"
    assert run.work_off([planned], folder, "abc", time.monotonic() + 600, 1) == DONE
    assert (folder / planned.path).is_file()


@pytest.mark.parametrize(("note", "is_left"), [("", False), ("a text table, to be run again", True)])
def test_what_has_a_record_is_left_only_where_it_is_to_be_replaced(tmp_path, invent, note, is_left):
    entry = CALIBRATION[0]
    path = tmp_path / entry.path
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(invent(entry) | {"note": note}))
    assert (entry in run.left(tmp_path, "", [])) == is_left
