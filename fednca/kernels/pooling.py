"""Triton kernels for a GPU: max pooling of channels-last maps, 3x3 windows two apart, border of one.

Window (a, b) covers the pixels (2a-1 … 2a+1, 2b-1 … 2b+1); which of its nine won is one byte, kept for the way back
alone. Windows overlap: if each wrote its gradient to the pixel that won, they would have to take turns. Instead the
program of window (a, b) writes the pixels (2a, 2b) … (2a+1, 2b+1): each belongs to at most four windows, so it adds up
what comes from those that it won. Nothing is written twice, and sums have a fixed order.
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

from fednca.kernels.shared import OPTIONS, aligned, block_of

WINDOWS, WARPS = 16, 4  # of one program, along a row
FIXED = ["height", "width", "out_height", "out_width"]  # whose values triton does not compile for


@triton.jit
def _place(out_height, WINDOWS: tl.constexpr, COLS: tl.constexpr):
    """Return a program's place: its image, windows a and b (WINDOWS,), and channels (COLS,)."""
    row = tl.program_id(0)
    b = tl.program_id(1) * WINDOWS + tl.arange(0, WINDOWS)
    a = tl.zeros([WINDOWS], tl.int32) + row % out_height
    return row // out_height, a, b, tl.program_id(2) * COLS + tl.arange(0, COLS)


@triton.jit
def _spot(image, row, column, height, width, cols, C):
    """Return the offsets (WINDOWS, COLS) of pixels, and which of them are inside the map."""
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    at = (image * height + row) * width + column
    return at[:, None] * C + cols[None, :], inside[:, None] & (cols < C)[None, :]


@triton.jit(do_not_specialize=FIXED)
def _write_maxima(
    x_ptr, y_ptr, winner_ptr, height, width, out_height, out_width, C,
    WINDOWS: tl.constexpr, COLS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    image, a, b, cols = _place(out_height, WINDOWS, COLS)
    best = tl.full([WINDOWS, COLS], float("-inf"), tl.float32)
    first = tl.where(b == 0, 1, 0) + tl.where(a == 0, 3, 0)  # of the window's pixels inside the map
    winner = tl.zeros([WINDOWS, COLS], tl.int32) + first[:, None]
    for pixel in tl.static_range(9):
        at, inside = _spot(image, 2 * a - 1 + pixel // 3, 2 * b - 1 + pixel % 3, height, width, cols, C)
        value = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)  # NaN wins
        best = tl.where(better, value, best)
        winner = tl.where(better, pixel, winner)
    at, inside = _spot(image, a, b, out_height, out_width, cols, C)
    tl.store(y_ptr + at, best.to(y_ptr.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(winner_ptr + at, winner.to(tl.uint8), mask=inside)


@triton.jit
def _window(g_ptr, winner_ptr, image, a, b, out_height, out_width, cols, C):
    """Return the gradient of windows (WINDOWS, COLS), and which of their pixels won; beyond the map, none did."""
    at, inside = _spot(image, a, b, out_height, out_width, cols, C)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return g, tl.load(winner_ptr + at, mask=inside, other=9)


@triton.jit(do_not_specialize=FIXED)
def _write_gradient(
    g_ptr, winner_ptr, dx_ptr, height, width, out_height, out_width, C, WINDOWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    image, a, b, cols = _place(out_height, WINDOWS, COLS)
    here, here_won = _window(g_ptr, winner_ptr, image, a, b, out_height, out_width, cols, C)
    right, right_won = _window(g_ptr, winner_ptr, image, a, b + 1, out_height, out_width, cols, C)
    below, below_won = _window(g_ptr, winner_ptr, image, a + 1, b, out_height, out_width, cols, C)
    across, across_won = _window(g_ptr, winner_ptr, image, a + 1, b + 1, out_height, out_width, cols, C)
    # pixel 3i+j of window (a, b) is (2a-1+i, 2b-1+j)
    at, inside = _spot(image, 2 * a, 2 * b, height, width, cols, C)
    dx = tl.where(here_won == 4, here, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    at, inside = _spot(image, 2 * a, 2 * b + 1, height, width, cols, C)
    dx = tl.where(here_won == 5, here, 0.0) + tl.where(right_won == 3, right, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    at, inside = _spot(image, 2 * a + 1, 2 * b, height, width, cols, C)
    dx = tl.where(here_won == 7, here, 0.0) + tl.where(below_won == 1, below, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    at, inside = _spot(image, 2 * a + 1, 2 * b + 1, height, width, cols, C)
    dx = tl.where(here_won == 8, here, 0.0) + tl.where(right_won == 6, right, 0.0)
    dx += tl.where(below_won == 2, below, 0.0) + tl.where(across_won == 0, across, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


class MaxPool(torch.autograd.Function):
    """Max pooling that keeps one byte per window and channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the maxima; of equal pixels the first one wins."""
        ctx.shape = x.shape
        y, winner = _room(x, x.dtype), _room(x, torch.uint8)
        _launch(_write_maxima, (x, y, winner), x.shape, KEEP=True)
        ctx.save_for_backward(winner)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Give each window's gradient to the pixel that won."""
        (winner,) = ctx.saved_tensors
        dx = torch.empty(ctx.shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
        _launch(_write_gradient, (aligned(g), winner, dx), ctx.shape)
        return dx


def maxima(x: Tensor) -> Tensor:
    """Return the maxima without keeping which pixels won."""
    y = _room(x, x.dtype)
    _launch(_write_maxima, (x, y, y), x.shape, KEEP=False)
    return y


def _room(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty map with a place for each window."""
    images, channels, height, width = x.shape
    out = (images, channels, (height + 1) // 2, (width + 1) // 2)
    return torch.empty(out, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], shape: torch.Size, **flags: bool) -> None:
    """Launch a kernel with a program for each piece of a row of windows."""
    images, channels, height, width = shape
    out_height, out_width, block = (height + 1) // 2, (width + 1) // 2, block_of(channels)
    grid = (images * out_height, triton.cdiv(out_width, WINDOWS), triton.cdiv(channels, block))
    with torch.cuda.device_of(tensors[0]):
        sizes = (height, width, out_height, out_width, channels)
        kernel[grid](*tensors, *sizes, WINDOWS, block, **flags, num_warps=WARPS, **OPTIONS)


@cache
def warm_up(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile all that batches of any size need."""
    x = torch.zeros(1, channels, 1, 1, dtype=dtype, device=device)
    g, winner = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.uint8)
    _launch(_write_maxima, (x, torch.empty_like(x), winner), x.shape, KEEP=True)
    _launch(_write_gradient, (g, winner, torch.empty_like(x)), x.shape)
    maxima(x)
