"""Triton kernel for evaluation on a GPU: BatchNorm of channels-last maps, perhaps with a shortcut's sum and a ReLU.

It normalises by running statistics, so nothing is reduced first and each program can do its tile alone. A map
(N, C, H, W) lies in memory as rows (N·H·W) of C values.
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202 (triton gives annotations of kernels a meaning of its own)

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednca.kernels.norms import FIXED
from fednca.kernels.shared import OPTIONS, block_of, tile_at, write_tile

ROWS, WARPS = 32, 2  # of one program


@triton.jit(do_not_specialize=FIXED)
def _write_normal(
    x_ptr, shortcut_ptr, y_ptr, running_mean_ptr, running_var_ptr, weight_ptr, bias_ptr, eps, rows, C,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, COLS)
    cols = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    mean = tl.load(running_mean_ptr + cols, mask=cols < C, other=0.0)
    var = tl.load(running_var_ptr + cols, mask=cols < C, other=1.0)
    scale = tl.load(weight_ptr + cols, mask=cols < C, other=0.0) / tl.sqrt(var + eps)
    bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0)
    at, inside = tile_at(0, tl.program_id(0) // blocks, rows, cols, C, ROWS)
    write_tile(x_ptr, shortcut_ptr, y_ptr, at, inside, mean, scale, bias, ADD, RELU)


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: list[Tensor],
    eps: float,
    relu: bool,
    shortcut: Tensor | None = None,
) -> Tensor:
    """Return a map normalised by running mean and variance, plus a shortcut if there is one, in its own type."""
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    y = torch.empty_like(x, memory_format=torch.channels_last)
    block = block_of(channels)
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(channels, block),)
    maps = (x, x if shortcut is None else shortcut, y)
    tile = (shortcut is not None, relu, ROWS, block)
    with torch.cuda.device_of(x):
        _write_normal[grid](*maps, *running, weight, bias, eps, rows, channels, *tile, num_warps=WARPS, **OPTIONS)
    return y


@cache
def warm_up(channels: int, dtype: torch.dtype, relu: bool, device: torch.device, add: bool = False) -> None:
    """Compile all that batches of any size need."""
    x = torch.zeros(1, channels, 1, 1, dtype=dtype, device=device)
    mean, var, weight, bias = torch.ones(4, channels, dtype=torch.float32, device=device)
    normalise(x, weight, bias, [mean, var], 1e-5, relu, x if add else None)
