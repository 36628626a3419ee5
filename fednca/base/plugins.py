"""Plug-ins from other packages, by entry point or as `package.module:Name`."""

import importlib
import os
import sys
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fednca.base.errors import FedncaError


@cache
def plugin_names(kind: str) -> list[str]:
    """Return the names that installed packages register as `fednca.KIND`."""
    return sorted({point.name for point in entry_points(group=f"fednca.{kind}")})


def is_reference(name: str) -> bool:
    """Return whether a name is written as `package.module:Name`."""
    return ":" in name


def load_plugin(kind: str, name: str) -> Any:  # noqa: ANN401
    """Import the object that a name refers to: an entry point, or `package.module:Name`."""
    if not is_reference(name):
        (point, *_) = entry_points(group=f"fednca.{kind}", name=name)
        return point.load()
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109 (an installed command does not search the current folder)
        sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise FedncaError(f"'{name}' cannot be imported ({error}); write it as package.module:Name") from error
    return found
