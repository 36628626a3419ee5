"""Triton kernels of our own for a GPU, most of them for bf16; whoever uses them imports them from here.

`accelerate(model, plan)` puts them into a model; what needs triton is imported when it is first used.

How to read one: a launch starts a grid of *programs*, and each does the same work on its own tile of the numbers.
`tl.arange` gives the positions in a tile, and a mask leaves out those beyond the edge of a map. What is marked
`tl.constexpr` is compiled in: another value needs another kernel. Nothing can be compiled while a CUDA graph is
captured. So numbers that depend on the batch are listed as FIXED, which keeps triton from compiling for their values,
and `warm_up` launches each kernel once before a capture. Maps lie channels last in memory: a row of C values per pixel.
"""

from fednca.kernels.fusion import Plan, accelerate, available, watch
from fednca.kernels.layers import FusedStem

__all__ = ["FusedStem", "Plan", "accelerate", "available", "watch"]
