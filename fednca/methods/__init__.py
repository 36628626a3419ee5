"""Federated methods: the contract, the registry, and one file each."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.methods.contract import (
        About,
        Closing,
        Exchanges,
        Learner,
        Local,
        Method,
        Rule,
        Server,
        Tensors,
        Update,
        average,
        with_gradients,
    )
    from fednca.methods.fedavg import LinearLearner
    from fednca.methods.registry import create_method, find_method, method_names
else:
    __getattr__, __dir__ = lazy(__name__, "registry", "contract", "fedavg")

__all__ = [
    "About", "Closing", "Exchanges", "Learner", "LinearLearner", "Local", "Method", "Rule", "Server", "Tensors",
    "Update", "average", "create_method", "find_method", "method_names", "with_gradients",
]  # fmt: skip
