"""What all other packages use: errors, files, randomness, devices, named tensors, plug-ins."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.base.devices import pick_device
    from fednca.base.errors import FedncaError, RunFailedError, UnfitEngineError, unknown_name
    from fednca.base.files import write_atomic
    from fednca.base.packages import needed
    from fednca.base.randomness import derive_seed, numpy_rng, seeded, torch_rng
    from fednca.base.tensors import Layout, Packed
else:
    __getattr__, __dir__ = lazy(__name__, "errors", "packages", "files", "randomness", "devices", "tensors")

__all__ = [
    "FedncaError", "Layout", "Packed", "RunFailedError", "UnfitEngineError", "derive_seed", "needed", "numpy_rng",
    "pick_device", "seeded", "torch_rng", "unknown_name", "write_atomic",
]  # fmt: skip
