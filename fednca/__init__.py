"""fednca: multi-label federated image classification when every client sees different labels.

Train a federation and read its results:

    run = fednca.train(fednca.load_config("demo", {"method.name": "fednca-ml"}))
    run.results["val"]["test"]["macro_f1"]
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednca.base.errors import FedncaError
    from fednca.config import Config, load_config
    from fednca.runs import Run, resume, train
    from fednca.runs.callbacks import Callback

    __version__: str

__all__ = ["Callback", "Config", "FedncaError", "Run", "load_config", "resume", "train"]

_HOMES = {
    "Callback": "fednca.runs.callbacks",
    "Config": "fednca.config",
    "FedncaError": "fednca.base.errors",
    "Run": "fednca.runs",
    "load_config": "fednca.config",
    "resume": "fednca.runs",
    "train": "fednca.runs",
}


def __getattr__(name: str) -> object:  # torch is imported when it is first needed
    if name == "__version__":
        from importlib.metadata import version

        return version("fednca")
    if name not in _HOMES:
        raise AttributeError(f"module 'fednca' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:  # so that a notebook completes the names
    return sorted({*globals(), *__all__, "__version__"})
