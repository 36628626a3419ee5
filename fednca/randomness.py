"""Random numbers as a function of (seed, purpose, round, client): no global state, and no dependence on order."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


GLOBAL = threading.RLock()  # hold it to use torch's global generators or switches, which all threads share
if hasattr(os, "register_at_fork"):  # if another thread held it during a fork, the child could never get it
    os.register_at_fork(before=GLOBAL.acquire, after_in_parent=GLOBAL.release, after_in_child=GLOBAL.release)


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Derive a 63-bit seed, the same on every machine and Python version.

    >>> derive_seed(0, "batches", 3, 1) == derive_seed(0, "batches", 3, 1)
    True
    """
    text = ":".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a NumPy generator for this seed, purpose and numbers (round, client, …)."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, *numbers)))


def torch_rng(seed: int, purpose: str, *numbers: int) -> "torch.Generator":
    """Return a CPU torch generator for this seed, purpose and numbers (round, client, …)."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, purpose, *numbers))


@contextmanager
def seeded(seed: int, purpose: str, *numbers: int) -> Iterator[None]:
    """Run a block under its own global torch seed (for initialisation and dropout), then restore the old state."""
    import torch

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with GLOBAL, torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, purpose, *numbers))
        yield
