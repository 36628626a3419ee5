"""Which engine is chosen, and why not another."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch
from helpers import tiny
from parity import start

import fednca.engine.choose
import fednca.engine.processes
from fednca.engine.eager import EagerEngine
from fednca.engine.processes import ProcessEngine, forks_can_train
from fednca.errors import FedncaError


def engine_of(**changes):
    return start(tiny(**changes))[0].engine


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
