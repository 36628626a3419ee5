"""Packages that only some commands need."""

import importlib
from types import ModuleType

from fednca.errors import FedncaError


def needed(name: str, extra: str) -> ModuleType:
    """Import a package that one of this package's extras brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FedncaError(f"this needs the package '{name}': pip install 'fednca[{extra}]'") from error
