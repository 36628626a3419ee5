"""Plug-ins from other packages, by entry point or as `package.module:Name`."""

import importlib
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fednca.base.errors import FedncaError


@cache
def plugin_names(kind: str) -> list[str]:
    """Return the names that installed packages register in the group `fednca.KIND`."""
    return sorted({point.name for point in entry_points(group=f"fednca.{kind}")})


def find_plugin(kind: str, name: str) -> Any:  # noqa: ANN401
    """Return the object that a plug-in's name refers to, or None if the name is not a plug-in's."""
    if name in plugin_names(kind):
        (point, *_) = entry_points(group=f"fednca.{kind}", name=name)
        return point.load()
    module, colon, attribute = name.partition(":")
    if not colon:
        return None
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command does not search the current folder
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise FedncaError(f"'{name}' cannot be imported ({error}); write it as package.module:Name") from error
