"""Optional packages, which come with fednca's extras."""

import importlib
from types import ModuleType

from fednca.base.errors import FedncaError


def needed(module: str, extra: str, by: str = "this", instead: str = "") -> ModuleType:
    """Import a module of an optional package, or raise an error that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise FedncaError(f"{by} needs the package '{package}': pip install 'fednca[{extra}]'{instead}") from error
