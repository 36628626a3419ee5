"""Plug-ins from other packages, by entry point or as `package.module:Name`."""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from traceback import extract_tb
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
        return _imported(name, point.load, "mend or uninstall the package that registers it")
    module, colon, attribute = name.partition(":")
    if not colon:
        return None
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command does not search the current folder
        sys.path.append(here)
    way_out = "write it as package.module:Name, of a package that is installed or in the current folder"
    return _imported(name, lambda: getattr(importlib.import_module(module), attribute), way_out)


def check_call(what: str, found: object, arguments: str) -> None:
    """Refuse a plug-in that cannot be called with these arguments, written as in `dim, classes`."""
    if not callable(found):
        kind = type(found).__name__
        raise FedncaError(f"{what} is of type {kind}; name a class or function that takes ({arguments})")
    try:
        signature(found).bind(*arguments.split(", "))
    except TypeError as error:
        raise FedncaError(f"{what} must take ({arguments}): {error}") from None
    except ValueError:  # some functions written in C do not tell what they take
        return


def _imported(name: str, load: Callable[[], Any], way_out: str) -> Any:  # noqa: ANN401
    """Import an object, and say in one sentence why it cannot be: its file may raise anything."""
    try:
        return load()
    except FedncaError:  # a part of fednca's refused to be built there, and says why
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise FedncaError(f"'{name}' cannot be imported ({error}); {way_out}") from error
    except (Exception, SystemExit) as error:
        place = extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}, in line {place.lineno} of {Path(place.filename).name}"
        reason = f"{type(error).__name__}: {error}" if isinstance(error, SyntaxError) else reason
        raise FedncaError(f"'{name}' cannot be imported ({reason})") from error
