"""The device on which tensors are computed, and the threads of a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fednca.base.errors import FedncaError


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Run a block with this many threads per CPU operation, then restore the old number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(name: str) -> torch.device:
    """Return the device by name; `auto` is the GPU if there is one. Refuse a device that does not exist."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # GPU queues: with the default of 8, more streams wait
    device = read_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise FedncaError(f"device '{name}' is not there: torch finds {torch.cuda.device_count()} CUDA devices")
    return device


def read_device(name: str) -> torch.device:
    """Return the device by name, whether it exists or not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise FedncaError(f"device '{name}' is not known (known: auto, cpu, cuda, cuda:N)")
    return device
