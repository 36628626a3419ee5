"""Where tensors are computed: the device, and the threads of a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fednca.base.errors import FedncaError


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Run a block with this many threads per CPU operation, then set the old number again."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(name: str) -> torch.device:
    """Return the device by name; `auto` is the GPU where there is one."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues of a GPU: the default's 8 hold up more streams
    device = read_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise FedncaError(f"device '{name}' is not there: torch finds {torch.cuda.device_count()} CUDA devices")
    return device


def read_device(name: str) -> torch.device:
    """Return the device by name, whether it is there or not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise FedncaError(f"device '{name}' is not known (known: auto, cpu, cuda, cuda:N)")
    return device
