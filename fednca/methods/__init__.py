"""Federated methods, one file each; a file's name is the method's name, so adding one touches nothing else."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from fednca.errors import FedncaError, unknown_name

if TYPE_CHECKING:
    from fednca.config import Config
    from fednca.methods.base import Method

__all__ = ["create_method", "method_class", "method_names"]


def method_names() -> list[str]:
    """Return the names of all methods, without importing any."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if m.name != "base")


def method_class(name: str) -> "type[Method]":
    """Return the class of a method by its name."""
    if name not in method_names():
        raise unknown_name("method", name, method_names())
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    found: type[Method] = module.METHOD
    return found


def create_method(config: "Config") -> "Method":
    """Create the configured method, on the configured learner."""
    from fednca.config import validate
    from fednca.losses import CRITERIA

    chosen = config.method
    pretrained = config.model.pretrained != "none"
    cls = method_class(chosen.name)
    learner = None
    if chosen.learner is not None:
        other = method_class(chosen.learner)
        if not cls.changes_rule() and chosen.name != "fedavg":
            raise FedncaError(
                f"method '{chosen.name}' differs from fedavg only in what a client learns, which --learner replaces; "
                f"use fedavg (and --criterion for another loss)"
            )
        hyper = validate(other.Hyper, chosen.learner_options, "method.learner_options")
        learner = other(hyper, pretrained=pretrained)
    method = cls(validate(cls.Hyper, chosen.options, "method.options"), pretrained=pretrained, learner=learner)
    method.clients = 1 if cls.centralized else config.partition.clients
    if chosen.criterion is not None:
        method.learner.criterion = CRITERIA[chosen.criterion]
    return method
