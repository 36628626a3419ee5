"""Public names of a package that are imported when they are first used, so that importing the package stays cheap."""

import sys
from collections.abc import Callable
from importlib import import_module


def lazy(package: str, *modules: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, which find the names in its `__all__` in these modules of it.

    Name cheap modules first: they are imported one after another, until one of them has the name. Type checkers need
    ordinary imports besides, under `if TYPE_CHECKING`.
    """

    def load(name: str) -> object:
        room = sys.modules[package]
        for module in modules if name in room.__all__ else ():
            found: object = getattr(import_module(f"{package}.{module}"), name, None)
            if found is not None:
                setattr(room, name, found)
                return found
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sys.modules[package].__all__})

    return load, names
