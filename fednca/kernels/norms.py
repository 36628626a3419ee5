"""Triton kernels for training on a GPU: BatchNorm of channels-last maps, perhaps with a shortcut's sum and a ReLU.

A map (N, C, H, W) lies in memory as rows (N·H·W) of C values. BatchNorm is bound by memory: what counts is how often
the map is read and written. In training, mean and variance of a channel must be known before its first output is
written. A large map takes two launches for that: the first reduces it to partial results; in the second, every program
joins them for itself and writes its rows. A small map takes one launch, whose programs have all rows of some channels.
The shortcut's sum and the ReLU are done while the value is at hand anyway.

Sums run in a fixed order, without atomics, so that a run repeats itself; and a kernel compiled once serves batches of
every size, so that a step can be captured without compiling.
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN401 (triton gives annotations of kernels a meaning of its own)

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fednca.kernels.shared import OPTIONS, aligned, block_of, cut, tile_at, write_tile

REDUCE_ROWS, REDUCE_WARPS = 64, 8  # of one step of a program that reduces
REDUCE_PROGRAMS = 256  # that reduce a map, at most
MOST_PARTIALS = 64  # of a channel, a power of two: every program that writes joins them for itself
WRITE_ROWS, WRITE_WARPS = 64, 8
WRITE_PROGRAMS = 264
SMALL, SMALL_PER_CHANNEL = 2048, 32  # rows up to which one launch does all, each program for its own channels
SMALL_ROWS, SMALL_CHANNELS, SMALL_WARPS = 512, 16, 8

# What triton would otherwise compile for again: numbers that depend on the batch, and addresses of weights
FIXED = [
    "rows", "splits", "per_split", "per_program", "weight_ptr", "bias_ptr", "running_mean_ptr", "running_var_ptr",
]  # fmt: skip


# -- BatchNorm, forward ------------------------------------------------------------------------------------------------


@triton.jit
def _join(counts, means, squares, total):
    """Join means and sums of squared deviations (K, COLS) of parts with `counts` (K,) values each (Chan et al.)."""
    counts = counts.to(tl.float32)[:, None]
    mean = tl.sum(counts * means, 0) / total
    apart = means - mean[None, :]
    return mean, tl.sum(squares + counts * apart * apart, 0)


@triton.jit
def _moments(x_ptr, start, stop, cols, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return mean and sum of squared deviations (COLS,) of some rows: Welford's update in every lane, then joined.

    E[x²] - E[x]² would need one pass too, but its two terms cancel where the mean is far from zero.
    """
    means = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(tl.cdiv(stop - start, ROWS)):
        at, inside = tile_at(start, step, stop, cols, C, ROWS)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, x - means, 0.0)
        means += apart * (1.0 / (step + 1))
        squares += apart * (x - means)
    counts = (stop - start - tl.arange(0, ROWS) + ROWS - 1) // ROWS  # rows that each lane has seen
    return _join(counts, means, squares, stop - start)


@triton.jit
def _follow(running_ptr, cols, C, value, momentum):
    """Move running statistics towards a batch's."""
    old = tl.load(running_ptr + cols, mask=cols < C, other=0.0)
    tl.store(running_ptr + cols, momentum * value + (1 - momentum) * old, mask=cols < C)


@triton.jit(do_not_specialize=FIXED)
def _reduce_moments(x_ptr, partials_ptr, rows, splits, per_split, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(1)
    start = split * per_split
    mean, square = _moments(x_ptr, start, tl.minimum(start + per_split, rows), cols, C, ROWS, COLS)
    tl.store(partials_ptr + split * C + cols, mean, mask=cols < C)
    tl.store(partials_ptr + (splits + split) * C + cols, square, mask=cols < C)


@triton.jit(do_not_specialize=FIXED)
def _write_output(
    x_ptr, shortcut_ptr, y_ptr, partials_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, saved_ptr,
    momentum, eps, rows, splits, per_split, per_program, C,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    # From the end of the map to its start: what was reduced last is most likely still in the cache.
    part = tl.num_programs(1) - 1 - tl.program_id(1)
    start = part * per_program
    if PARTIALS == 0:  # this program has all rows
        mean, square = _moments(x_ptr, 0, rows, cols, C, ROWS, COLS)
    else:
        at, inside = tile_at(0, 0, splits, cols, C, PARTIALS)
        means = tl.load(partials_ptr + at, mask=inside, other=0.0)
        squares = tl.load(partials_ptr + splits * C + at, mask=inside, other=0.0)
        counts = tl.maximum(tl.minimum(rows - tl.arange(0, PARTIALS) * per_split, per_split), 0)
        mean, square = _join(counts, means, squares, rows)
    inverse = 1.0 / tl.sqrt(square / rows + eps)
    if part == 0:  # one program of each block of channels keeps what all of them have found
        tl.store(saved_ptr + cols, mean, mask=cols < C)
        tl.store(saved_ptr + C + cols, inverse, mask=cols < C)
        _follow(running_mean_ptr, cols, C, mean, momentum)
        _follow(running_var_ptr, cols, C, square / (rows - 1), momentum)
    scale = inverse * tl.load(weight_ptr + cols, mask=cols < C, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0)
    steps = tl.cdiv(tl.minimum(per_program, rows - start), ROWS)
    for done in range(steps):
        at, inside = tile_at(start, steps - 1 - done, rows, cols, C, ROWS)
        write_tile(x_ptr, shortcut_ptr, y_ptr, at, inside, mean, scale, bias, ADD, RELU)


# -- BatchNorm, backward -----------------------------------------------------------------------------------------------


@triton.jit
def _kept(saved_ptr, weight_ptr, bias_ptr, cols, C):
    """Return what the forward pass used, (COLS,) each: mean, 1/σ, scale and bias."""
    mask = cols < C
    mean = tl.load(saved_ptr + cols, mask=mask, other=0.0)
    inverse = tl.load(saved_ptr + C + cols, mask=mask, other=0.0)
    scale = inverse * tl.load(weight_ptr + cols, mask=mask, other=0.0)
    return mean, inverse, scale, tl.load(bias_ptr + cols, mask=mask, other=0.0)


@triton.jit
def _load_pair(x_ptr, g_ptr, at, inside, mean, scale, bias, RELU: tl.constexpr):
    """Return a tile of x - mean, and of the gradient where ReLU let the value through.

    Whether it did is computed again from x, which is cheaper than to keep a mask of the whole map.
    """
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(x * scale[None, :] + bias[None, :] <= 0, 0.0, g)
    return x, g


@triton.jit
def _sums(
    x_ptr, g_ptr, start, stop, cols, C, mean, scale, bias, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Return the sums (COLS,) of g and of g·(x - mean) over some rows."""
    plain = tl.zeros([ROWS, COLS], tl.float32)
    product = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(tl.cdiv(stop - start, ROWS)):
        at, inside = tile_at(start, step, stop, cols, C, ROWS)
        x, g = _load_pair(x_ptr, g_ptr, at, inside, mean, scale, bias, RELU)
        plain += g
        product += g * x
    return tl.sum(plain, 0), tl.sum(product, 0)


@triton.jit(do_not_specialize=FIXED)
def _reduce_gradients(
    x_ptr, g_ptr, partials_ptr, weight_ptr, bias_ptr, saved_ptr, rows, splits, per_split, C,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(1)
    start = split * per_split
    mean, _, scale, bias = _kept(saved_ptr, weight_ptr, bias_ptr, cols, C)
    stop = tl.minimum(start + per_split, rows)
    plain, product = _sums(x_ptr, g_ptr, start, stop, cols, C, mean, scale, bias, RELU, ROWS, COLS)
    tl.store(partials_ptr + split * C + cols, plain, mask=cols < C)
    tl.store(partials_ptr + (splits + split) * C + cols, product, mask=cols < C)


@triton.jit(do_not_specialize=FIXED)
def _write_gradient(
    x_ptr, g_ptr, dx_ptr, affine_ptr, partials_ptr, weight_ptr, bias_ptr, saved_ptr, rows, splits, per_program, C,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.num_programs(1) - 1 - tl.program_id(1)
    start = part * per_program
    mean, inverse, scale, bias = _kept(saved_ptr, weight_ptr, bias_ptr, cols, C)
    if PARTIALS == 0:  # this program has all rows
        plain, product = _sums(x_ptr, g_ptr, 0, rows, cols, C, mean, scale, bias, RELU, ROWS, COLS)
    else:
        at, inside = tile_at(0, 0, splits, cols, C, PARTIALS)
        plain = tl.sum(tl.load(partials_ptr + at, mask=inside, other=0.0), 0)
        product = tl.sum(tl.load(partials_ptr + splits * C + at, mask=inside, other=0.0), 0)
    if part == 0:
        tl.store(affine_ptr + cols, product * inverse, mask=cols < C)
        tl.store(affine_ptr + C + cols, plain, mask=cols < C)
    # dx = scale·(g - mean(g) - x̂·mean(g·x̂)), with x̂ = (x - mean)·inverse
    constant = plain / rows
    slope = product * inverse * inverse / rows
    steps = tl.cdiv(tl.minimum(per_program, rows - start), ROWS)
    for done in range(steps):
        at, inside = tile_at(start, steps - 1 - done, rows, cols, C, ROWS)
        x, g = _load_pair(x_ptr, g_ptr, at, inside, mean, scale, bias, RELU)
        dx = scale[None, :] * (g - constant[None, :] - x * slope[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# -- launches ----------------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: list[Tensor],
    momentum: float,
    eps: float,
    relu: bool,
    small: bool,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and mean and 1/σ (2, C) for the way back; running mean and variance follow."""
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    y = torch.empty_like(x, memory_format=torch.channels_last)
    saved = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    maps = (x, x if shortcut is None else shortcut, y)
    own = (weight, bias, *running, saved, momentum, eps, rows)
    flags = (shortcut is not None, relu)
    if small:
        grid = (triton.cdiv(channels, SMALL_CHANNELS), 1)
        tile = (*flags, SMALL_ROWS, SMALL_CHANNELS, 0)
        _write_output[grid](*maps, saved, *own, 1, rows, rows, channels, *tile, num_warps=SMALL_WARPS, **OPTIONS)
        return y, saved
    block = block_of(channels)
    blocks = triton.cdiv(channels, block)
    per_split, splits = cut(rows, min(MOST_PARTIALS, REDUCE_PROGRAMS // blocks), REDUCE_ROWS)
    partials = torch.empty(2, splits, channels, dtype=torch.float32, device=x.device)
    _reduce_moments[(blocks, splits)](
        x, partials, rows, splits, per_split, channels, REDUCE_ROWS, block, num_warps=REDUCE_WARPS, **OPTIONS
    )
    per_program, programs = cut(rows, WRITE_PROGRAMS // blocks, WRITE_ROWS)
    tile = (*flags, WRITE_ROWS, block, MOST_PARTIALS)
    _write_output[(blocks, programs)](
        *maps, partials, *own, splits, per_split, per_program, channels, *tile, num_warps=WRITE_WARPS, **OPTIONS
    )
    return y, saved


def backward(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor, saved: Tensor, relu: bool, small: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    affine = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    own = (weight, bias, saved, rows)
    if small:
        grid = (triton.cdiv(channels, SMALL_CHANNELS), 1)
        tile = (relu, SMALL_ROWS, SMALL_CHANNELS, 0)
        _write_gradient[grid](x, g, dx, affine, saved, *own, 1, rows, channels, *tile, num_warps=SMALL_WARPS, **OPTIONS)
        return dx, affine[0], affine[1]
    block = block_of(channels)
    blocks = triton.cdiv(channels, block)
    per_split, splits = cut(rows, min(MOST_PARTIALS, REDUCE_PROGRAMS // blocks), REDUCE_ROWS)
    partials = torch.empty(2, splits, channels, dtype=torch.float32, device=x.device)
    _reduce_gradients[(blocks, splits)](
        x, g, partials, *own, splits, per_split, channels, relu, REDUCE_ROWS, block, num_warps=REDUCE_WARPS, **OPTIONS
    )
    per_program, programs = cut(rows, WRITE_PROGRAMS // blocks, WRITE_ROWS)
    tile = (relu, WRITE_ROWS, block, MOST_PARTIALS)
    _write_gradient[(blocks, programs)](
        x, g, dx, affine, partials, *own, splits, per_program, channels, *tile, num_warps=WRITE_WARPS, **OPTIONS
    )
    return dx, affine[0], affine[1]


class BatchNorm(torch.autograd.Function):
    """BatchNorm in training, with or without ReLU; keeps its input and two numbers per channel, no mask.

    With a shortcut, relu(BatchNorm + shortcut): it keeps the output too, which the next convolution keeps in any case.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: list[Tensor],
        momentum: float,
        eps: float,
        relu: bool,
        shortcut: Tensor | None = None,
    ) -> Tensor:
        """Normalise."""
        with torch.cuda.device_of(x):
            y, saved = forward(x, weight, bias, running, momentum, eps, relu, is_small(x), shortcut)
        ctx.relu = relu
        ctx.save_for_backward(x, weight, bias, saved, None if shortcut is None else y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight, bias and shortcut."""
        x, weight, bias, saved, y = ctx.saved_tensors
        g = aligned(g)
        if y is not None:
            g = torch.ops.aten.threshold_backward(g, y, 0)  # the ReLU's own way back: BatchNorm and shortcut need it
        with torch.cuda.device_of(x):
            found = backward(x, g, weight, bias, saved, ctx.relu and y is None, is_small(x))
        return *found, None, None, None, None, None if y is None else g


def is_small(x: Tensor) -> bool:
    """Return whether one launch does everything."""
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    return rows <= min(SMALL, SMALL_PER_CHANNEL * channels)


@cache
def warm_up(channels: int, dtype: torch.dtype, relu: bool, device: torch.device, add: bool = False) -> None:
    """Compile all that batches of any size need."""
    x = torch.zeros(2, channels, 1, 1, dtype=dtype, device=device)
    weight, bias, mean, var = torch.ones(4, channels, dtype=torch.float32, device=device)
    with torch.cuda.device_of(x):
        for small in (True, False):  # both ways, whatever the size of this map
            y, saved = forward(x, weight, bias, [mean, var], 0.1, 1e-5, relu, small, x if add else None)
            backward(x, y, weight, bias, saved, relu and not add, small)
