"""The datasets by name: a module of this folder, an entry point `fednca.datasets`, or `package.module:Name`."""

import pkgutil
from importlib import import_module
from typing import cast

from fednca.base.errors import unknown_name
from fednca.base.plugins import find_plugin, plugin_names
from fednca.data.types import Source


def source_names() -> list[str]:
    """List the datasets, without importing their modules."""
    own = [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)]
    return sorted({*own, *plugin_names("datasets")})


def get_source(name: str) -> Source:
    """Import and return the dataset called `name`."""
    if (outside := find_plugin("datasets", name)) is not None:
        return cast(Source, outside)
    if name not in source_names():
        raise unknown_name("dataset", name, source_names())
    return cast(Source, import_module(f"{__name__}.{name.replace('-', '_')}"))
