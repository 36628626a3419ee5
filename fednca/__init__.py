"""fednca: multi-label federated image classification when every client sees different labels.

Train a federation and read its results:

    run = fednca.train(fednca.load_config("demo", {"method.name": "fednca-ml"}))
    run.results["val"]["test"]["macro_f1"]
"""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.base import FedncaError
    from fednca.config import Config, load_config
    from fednca.runs import Callback, Run, resume, train

    __version__: str
else:
    _load, __dir__ = lazy(__name__, "base", "config", "runs")

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("fednca")
        return _load(name)


__all__ = ["Callback", "Config", "FedncaError", "Run", "load_config", "resume", "train"]
