"""Devices by name, and the threads of a block."""

import pytest
import torch

from fednca.base.devices import cpu_threads, pick_device, read_device
from fednca.base.errors import FedncaError


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:x"])
def test_a_device_that_nobody_knows_is_refused_with_the_known_ones(name):
    with pytest.raises(FedncaError, match=rf"device '{name}' is not known \(known: auto, cpu, cuda, cuda:N\)"):
        read_device(name)


def test_a_device_that_is_not_there_can_be_read_and_not_picked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert read_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(FedncaError, match="device 'cuda:1' is not there: torch finds 1 CUDA devices"):
        pick_device("cuda:1")


@pytest.mark.parametrize(("there", "kind"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_gpu_where_there_is_one(there, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert read_device("auto").type == kind


def fail_with_threads(number, seen):
    with cpu_threads(number):
        seen.append(torch.get_num_threads())
        raise ZeroDivisionError


def test_threads_are_those_of_before_after_a_block_that_fails():
    before, seen = torch.get_num_threads(), []
    with pytest.raises(ZeroDivisionError):
        fail_with_threads(before + 1, seen)
    assert (seen, torch.get_num_threads()) == ([before + 1], before)
