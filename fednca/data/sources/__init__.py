"""The datasets by name: a module of this folder, an entry point `fednca.datasets`, or `package.module:Name`."""

import pkgutil
from importlib import import_module
from typing import cast

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.plugins import check_call, find_plugin, plugin_names
from fednca.config.options import Options
from fednca.data.types import Source

FACTS = ("Options", "SUMMARY", "SIZE", "LICENCE", "OBTAINED", "CLASSES")
CALLS = {"missing": "root", "prepare": "root, progress", "load": "options, root"}


def source_names() -> list[str]:
    """List the datasets, without importing their modules."""
    own = [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)]
    return sorted({*own, *plugin_names("datasets")})


def get_source(name: str) -> Source:
    """Import and return the dataset called `name`."""
    if (outside := find_plugin("datasets", name)) is not None:
        check_source(name, outside)
        return cast(Source, outside)
    if name not in source_names():
        raise unknown_name("dataset", name, source_names())
    return cast(Source, import_module(f"{__name__}.{name.replace('-', '_')}"))


def check_source(name: str, found: object) -> None:
    """Refuse a dataset of another package that lacks something."""
    lacking = [each for each in (*FACTS, *CALLS) if not hasattr(found, each)]
    if lacking:
        raise FedncaError(f"dataset '{name}' has no {', '.join(lacking)}; a fednca.data.Source has them all")
    options = getattr(found, "Options")  # noqa: B009 - an object of which nothing is known yet
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise FedncaError(f"the Options of dataset '{name}' are no fednca.config.Options; make them a subclass")
    for call, arguments in CALLS.items():
        check_call(f"'{call}' of dataset '{name}'", getattr(found, call), arguments)
