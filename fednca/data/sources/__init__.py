"""The datasets by name: each module in this folder is one."""

import pkgutil
from importlib import import_module
from typing import cast

from fednca.data.types import Source
from fednca.errors import unknown_name


def source_names() -> list[str]:
    """List the datasets, without importing their modules."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def get_source(name: str) -> Source:
    """Import and return the module of the dataset called `name`."""
    if name not in source_names():
        raise unknown_name("dataset", name, source_names())
    return cast(Source, import_module(f"{__name__}.{name.replace('-', '_')}"))
