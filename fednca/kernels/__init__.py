"""Triton kernels of our own for a GPU, most of them for bf16; whoever uses them imports them from here.

`accelerate(model, plan)` puts them into a model; what needs triton is imported when it is first used.

How to read one: a launch starts a grid of *programs*, and each does the same work on its own tile of the numbers.
`tl.arange` gives the positions in a tile, and a mask leaves out those beyond the edge of a map. What is marked
`tl.constexpr` is compiled in: another value needs another kernel. Nothing can be compiled while a CUDA graph is
captured. So numbers that depend on the batch are listed as FIXED, which keeps triton from compiling for their values,
and `warm_up` launches each kernel once before a capture. Maps lie channels last in memory: a row of C values per pixel.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fednca.kernels.fusion import Plan, accelerate, available, watch, works
from fednca.kernels.layers import ALIGNMENT, DEVICE, DTYPES, FusedStem, gatherable

if TYPE_CHECKING:
    from fednca.kernels.adamw import AdamW, address_of
    from fednca.kernels.adamw import warm_up as warm_up_adamw
    from fednca.kernels.gathering import gather

__all__ = [
    "ALIGNMENT",
    "DEVICE",
    "DTYPES",
    "AdamW",
    "FusedStem",
    "Plan",
    "accelerate",
    "address_of",
    "available",
    "gather",
    "gatherable",
    "warm_up_adamw",
    "watch",
    "works",
]

_NEED_TRITON = {
    "AdamW": ("adamw", "AdamW"),
    "address_of": ("adamw", "address_of"),
    "warm_up_adamw": ("adamw", "warm_up"),
    "gather": ("gathering", "gather"),
}


def __getattr__(name: str) -> object:
    if name not in _NEED_TRITON:
        raise AttributeError(f"module 'fednca.kernels' has no attribute {name!r}")
    file, attribute = _NEED_TRITON[name]
    return getattr(import_module(f"fednca.kernels.{file}"), attribute)
