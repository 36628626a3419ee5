"""One run: its folder, the loop of rounds, and how it goes on."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednca.runs.callbacks import Callback
    from fednca.runs.run import Run
    from fednca.runs.training import resume, train

__all__ = ["Callback", "Run", "resume", "train"]

_HOMES = {"Callback": "callbacks", "Run": "run", "resume": "training", "train": "training"}


def __getattr__(name: str) -> object:  # the command line takes loggers from here, and its help needs no torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
