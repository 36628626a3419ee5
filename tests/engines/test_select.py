"""Which engine is chosen, and why not another."""

import multiprocessing
import os
import re
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny
from parity import start

import fednca.engines.processes
import fednca.engines.select
from fednca.base.errors import FedncaError, UnfitEngineError
from fednca.engines.eager import EagerEngine
from fednca.engines.processes import ProcessEngine, forks_can_train
from fednca.engines.select import select_engine


def engine_of(**changes):
    return select_engine(start(tiny(**changes))[0])


def test_auto_takes_processes_for_several_clients_on_several_cores(monkeypatch):
    monkeypatch.setattr(fednca.engines.select, "cores", lambda: 4)
    monkeypatch.setattr(fednca.engines.processes, "cores", lambda: 4)
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
        monkeypatch.setattr(fednca.engines.select, "cores", lambda: 1)
    if changes.pop("daemon", False):
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    if system := changes.pop("system", None):
        monkeypatch.setattr("platform.system", lambda: system)
    if changes.pop("fork", None):
        monkeypatch.setattr(fednca.engines.select, "forks_can_train", lambda: False)
    assert isinstance(engine_of(engine="auto", **changes), EagerEngine)
    with pytest.raises(FedncaError, match=f"engine 'processes' cannot be used: {hindrance}.*leave `engine` out"):
        engine_of(engine="processes", **changes)


def choose_on_a_gpu(place, engine="auto"):
    """Choose as if the workplace's device were a GPU; nothing is put on it."""
    return select_engine(replace(place, config=tiny(engine=engine), device=torch.device("cuda")))


def resident(shard):
    """Return a shard whose images lie where a GPU's would: in a tensor."""
    pixels = torch.from_numpy(shard.store.pixels.take(np.arange(len(shard.store.pixels))))
    return replace(shard, store=replace(shard.store, pixels=pixels))


def failing(error):
    def build(*_, **__):
        raise error

    return build


def test_images_that_do_not_fit_on_a_gpu_are_trained_eagerly_and_said_so():
    place, _ = start(tiny())  # its images stay in files
    assert choose_on_a_gpu(place).note == "engine: eager, since the images do not fit into the GPU's memory"
    with pytest.raises(FedncaError, match=r"'graphs' cannot be used: the images do not fit.*leave `engine` out"):
        choose_on_a_gpu(place, "graphs")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted\nCompile with"), "a step cannot be captured (operation not permitted)"),
        (UnfitEngineError("layers of the model share a weight"), "layers of the model share a weight"),
    ],
)
def test_what_graphs_cannot_do_is_trained_eagerly_and_said_so_in_one_line(error, reason, monkeypatch):
    place, server = start(tiny())
    place = replace(place, train=list(map(resident, place.train)), val=resident(place.val), test=resident(place.test))
    monkeypatch.setattr(fednca.engines.select, "GraphEngine", failing(error))
    chosen = choose_on_a_gpu(place)
    assert chosen.note == f"engine: eager, since {reason}"
    assert [result.update.client for result in chosen.train(1, [0, 2], server, {})] == [0, 2]
    with pytest.raises(FedncaError, match=f"engine 'graphs' cannot be used: {re.escape(reason)}; leave `engine` out"):
        choose_on_a_gpu(place, "graphs")


def test_a_step_too_large_for_the_gpu_is_one_sentence(monkeypatch):
    place, _ = start(tiny())
    place = replace(place, train=list(map(resident, place.train)), val=resident(place.val), test=resident(place.test))
    monkeypatch.setattr(fednca.engines.select, "GraphEngine", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(FedncaError, match=r"does not fit on the GPU; use a smaller train\.batch_size, evaluate"):
        choose_on_a_gpu(place)


def die(tensor):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(tensor):
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


@pytest.mark.parametrize("backward", [refuse, die, lambda tensor: threading.Event().wait()])
def test_forks_that_cannot_train_are_found_out(backward, monkeypatch, capfd):
    assert forks_can_train()
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr(fednca.engines.processes, "TRIAL_SECONDS", 0.3)
    assert not forks_can_train()
    assert capfd.readouterr() == ("", "")
