"""Triton kernels for a ResNet's first convolution: 7x7 over three channels, two apart, border of three, in bf16.

Tensor cores multiply matrices whose inner side is a multiple of 16, and three channels leave most of that empty. So
blocks of 2x2 pixels are folded into 16 channels, dy·8 + dx·3 + c, the other four zeros. With two blocks of border
before the image and one behind it, the convolution is one of 4x4 blocks, one apart. The four blocks of a row lie one
behind the other in memory, so a tile of pixels in one row of taps is a matrix (COLUMNS, 64), which tensor cores take.
A column is all pixels of one x of one image; a program has a tile of columns, and goes down the rows.
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

from fednca.kernels.shared import OPTIONS, aligned, block_of, cut

FOLD_BLOCKS, FOLD_WARPS = 128, 8  # of one program, along a row
FORWARD_COLUMNS, FORWARD_ROWS = 64, 28  # of one program
FORWARD_WARPS, FORWARD_STAGES = 4, 3
BACKWARD_COLUMNS, BACKWARD_ROWS = 32, 2  # of one step of a program
BACKWARD_WARPS, BACKWARD_STAGES = 4, 3
SPLITS = 264  # programs that share the pixels of the weight's gradient, at most
JOIN_SPLITS, JOIN_WARPS = 64, 4  # whose results are added in one step

# What triton would otherwise compile for again: numbers that depend on the batch, and addresses of weights
FIXED = [
    "weight_ptr", "stride_k", "stride_c", "stride_r", "stride_s", "gradient_ptr",
    "height", "width", "columns", "steps", "per_program", "per_split", "splits",
]  # fmt: skip
FOLDED: tl.constexpr = tl.constexpr(16)  # channels of a block
ROW: tl.constexpr = tl.constexpr(64)  # taps and channels in a row of four blocks
TAPS: tl.constexpr = tl.constexpr(16)  # blocks under the 4x4 kernel


# -- folding -----------------------------------------------------------------------------------------------------------


@triton.jit
def _fold_weight(
    tap, weight_ptr, kernel_ptr, stride_k, stride_c, stride_r, stride_s, C: tl.constexpr, COLS: tl.constexpr
):
    """Write one tap of the 4x4 kernel (FOLDED, COLS); the 7x7 one begins in the second pixel of its first block."""
    channel = tl.arange(0, FOLDED)
    cols = tl.arange(0, COLS)
    r = tap // 4 * 2 + channel // 8 - 1
    s = tap % 4 * 2 + channel % 8 // 3 - 1
    inside = (channel % 8 < 6) & (r >= 0) & (s >= 0)
    at = (channel % 8 % 3 * stride_c + r * stride_r + s * stride_s)[:, None] + cols[None, :] * stride_k
    value = tl.load(weight_ptr + at, mask=inside[:, None] & (cols < C)[None, :], other=0.0)
    tl.store(kernel_ptr + (tap * FOLDED + channel)[:, None] * COLS + cols[None, :], value)


@triton.jit
def _fold_row(row, images_ptr, folded_ptr, height, width, BLOCKS: tl.constexpr):
    """Write a piece of one row of blocks, border included; `height` and `width` count blocks without it."""
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    channel = tl.arange(0, FOLDED)
    y, x = row % (height + 3) - 2, block - 2
    within = tl.where((y >= 0) & (y < height), width, 0)
    pixels = (row // (height + 3) * height + y) * 2 + channel // 8  # rows of an image
    at = (pixels[None, :] * width + x[:, None]) * 6 + (channel % 8)[None, :]
    inside = ((x >= 0) & (x < within))[:, None] & (channel % 8 < 6)[None, :]
    value = tl.load(images_ptr + at, mask=inside, other=0.0)
    at = (row * (width + 3) + block)[:, None] * FOLDED + channel[None, :]
    tl.store(folded_ptr + at, value.to(tl.bfloat16), mask=(block < width + 3)[:, None])


@triton.jit(do_not_specialize=FIXED)
def _fold(
    images_ptr, folded_ptr, weight_ptr, kernel_ptr, stride_k, stride_c, stride_r, stride_s, height, width,
    C: tl.constexpr, COLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < TAPS:
        if tl.program_id(1) == 0:
            _fold_weight(tl.program_id(0), weight_ptr, kernel_ptr, stride_k, stride_c, stride_r, stride_s, C, COLS)
    else:
        _fold_row(tl.program_id(0) - TAPS, images_ptr, folded_ptr, height, width, BLOCKS)


# -- convolution -------------------------------------------------------------------------------------------------------


@triton.jit
def _columns(tile, columns, height, width, C: tl.constexpr, COLS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile's columns, and the offsets (COLUMNS, …) of their tops in the folded images and in a map."""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    known = tl.minimum(column, columns - 1)
    image, x = known // width, known % width
    folded = (image * (height + 3) * (width + 3) + x) * FOLDED
    mapped = (image * height * width + x) * C
    return column, folded[:, None] + tl.arange(0, ROW)[None, :], mapped[:, None] + tl.arange(0, COLS)[None, :]


@triton.jit(do_not_specialize=FIXED)
def _convolve(
    folded_ptr, kernel_ptr, y_ptr, columns, height, width, per_program,
    C: tl.constexpr, COLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, folded, mapped = _columns(tl.program_id(0), columns, height, width, C, COLS, COLUMNS)
    start = tl.program_id(1) * per_program
    stop = tl.minimum(start + per_program, height)
    cols = tl.arange(0, COLS)
    kernel = tl.arange(0, ROW)[:, None] * COLS + cols[None, :]
    first = tl.load(kernel_ptr + kernel)
    second = tl.load(kernel_ptr + ROW * COLS + kernel)
    third = tl.load(kernel_ptr + 2 * ROW * COLS + kernel)
    fourth = tl.load(kernel_ptr + 3 * ROW * COLS + kernel)
    # Each row of blocks lies under the kernel for four rows of the map. It is loaded once and added to all four; a row
    # of the map is done when it has seen its fourth row of taps.
    one = tl.zeros([COLUMNS, COLS], tl.float32)  # rows of the map that have seen one, two and three rows of taps
    two = tl.zeros([COLUMNS, COLS], tl.float32)
    three = tl.zeros([COLUMNS, COLS], tl.float32)
    for row in range(start, stop + 3):
        taps = tl.load(folded_ptr + folded + row * (width + 3) * FOLDED)
        done = tl.dot(taps, fourth, three)
        three = tl.dot(taps, third, two)
        two = tl.dot(taps, second, one)
        one = tl.dot(taps, first)
        inside = (column < tl.where(row >= start + 3, columns, 0))[:, None] & (cols < C)[None, :]
        tl.store(y_ptr + mapped + (row - 3) * width * C, done.to(tl.bfloat16), mask=inside)


# -- gradient of the weight --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=FIXED)
def _correlate(
    folded_ptr, g_ptr, partials_ptr, columns, height, width, steps, per_split,
    C: tl.constexpr, COLS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # The sum runs over all pixels of the batch. A program adds up its share of them; `_join` adds up the programs'.
    split = tl.program_id(0)
    cols = tl.arange(0, COLS)
    down = tl.cdiv(height, ROWS)
    first = tl.zeros([ROW, COLS], tl.float32)
    second = tl.zeros([ROW, COLS], tl.float32)
    third = tl.zeros([ROW, COLS], tl.float32)
    fourth = tl.zeros([ROW, COLS], tl.float32)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
        column, folded, mapped = _columns(step // down, columns, height, width, C, COLS, COLUMNS)
        top = step % down * ROWS
        for y in tl.static_range(ROWS):
            inside = (column < tl.where(top + y < height, columns, 0))[:, None] & (cols < C)[None, :]
            g = tl.load(g_ptr + mapped + (top + y) * width * C, mask=inside, other=0.0)
            for i in tl.static_range(4):
                row = tl.minimum(top + (y + i), height + 2)
                taps = tl.trans(tl.load(folded_ptr + folded + row * (width + 3) * FOLDED))
                if i == 0:
                    first = tl.dot(taps, g, first)
                elif i == 1:
                    second = tl.dot(taps, g, second)
                elif i == 2:
                    third = tl.dot(taps, g, third)
                else:
                    fourth = tl.dot(taps, g, fourth)
    at = partials_ptr + (split * 4 * ROW + tl.arange(0, ROW))[:, None] * COLS + cols[None, :]
    tl.store(at, first)
    tl.store(at + ROW * COLS, second)
    tl.store(at + 2 * ROW * COLS, third)
    tl.store(at + 3 * ROW * COLS, fourth)


@triton.jit(do_not_specialize=FIXED)
def _join(
    partials_ptr, gradient_ptr, stride_k, stride_c, stride_r, stride_s, splits,
    C: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    c, r, s = tl.program_id(0) // 49, tl.program_id(0) // 7 % 7, tl.program_id(0) % 7
    tap = (r + 1) // 2 * 4 + (s + 1) // 2
    row = tap * FOLDED + (r + 1) % 2 * 8 + (s + 1) % 2 * 3 + c
    cols = tl.arange(0, COLS)
    total = tl.zeros([SPLITS, COLS], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        at = (split * TAPS * FOLDED + row)[:, None] * COLS + cols[None, :]
        total += tl.load(partials_ptr + at, mask=(split < splits)[:, None], other=0.0)
    at = gradient_ptr + cols * stride_k + c * stride_c + r * stride_r + s * stride_s
    tl.store(at, tl.sum(total, 0).to(gradient_ptr.dtype.element_ty), mask=cols < C)


# -- launches ----------------------------------------------------------------------------------------------------------


def fold(images: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return images as blocks (N, H/2+3, W/2+3, 16) and the weight as a kernel for them (256, COLS), both in bf16."""
    count, _, height, width = images.shape
    height, width, channels = height // 2, width // 2, len(weight)
    folded = torch.empty(count, height + 3, width + 3, 16, dtype=torch.bfloat16, device=images.device)
    kernel = torch.empty(256, block_of(channels), dtype=torch.bfloat16, device=images.device)
    grid = (16 + count * (height + 3), triton.cdiv(width + 3, FOLD_BLOCKS))
    tile = (channels, kernel.shape[1], FOLD_BLOCKS)
    _fold[grid](images, folded, weight, kernel, *weight.stride(), height, width, *tile, num_warps=FOLD_WARPS, **OPTIONS)
    return folded, kernel


def convolve(folded: Tensor, kernel: Tensor, channels: int) -> Tensor:
    """Return the map (N, C, H/2, W/2), channels last."""
    count, height, width = len(folded), folded.shape[1] - 3, folded.shape[2] - 3
    shape = (count, channels, height, width)
    y = torch.empty(shape, dtype=torch.bfloat16, device=folded.device, memory_format=torch.channels_last)
    per_program, programs = cut(height, triton.cdiv(height, FORWARD_ROWS), 1)
    grid = (triton.cdiv(count * width, FORWARD_COLUMNS), programs)
    tile = (channels, kernel.shape[1], FORWARD_COLUMNS)
    options = {"num_warps": FORWARD_WARPS, "num_stages": FORWARD_STAGES, **OPTIONS}
    _convolve[grid](folded, kernel, y, count * width, height, width, per_program, *tile, **options)
    return y


def correlate(folded: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weight, in its type and as it lies in memory, from that of the map."""
    count, channels, height, width = g.shape
    block = block_of(channels)
    steps = triton.cdiv(count * width, BACKWARD_COLUMNS) * triton.cdiv(height, BACKWARD_ROWS)
    per_split, splits = cut(steps, SPLITS, 1)
    partials = torch.empty(splits, 256, block, dtype=torch.float32, device=g.device)
    tile = (channels, block, BACKWARD_COLUMNS, BACKWARD_ROWS)
    options = {"num_warps": BACKWARD_WARPS, "num_stages": BACKWARD_STAGES, **OPTIONS}
    _correlate[(splits,)](folded, g, partials, count * width, height, width, steps, per_split, *tile, **options)
    gradient = torch.empty_like(weight)
    own = (gradient, *gradient.stride(), splits)
    _join[(147,)](partials, *own, channels, block, JOIN_SPLITS, num_warps=JOIN_WARPS, **OPTIONS)
    return gradient


class StemConv(torch.autograd.Function):
    """The convolution, for images that need no gradient; keeps them folded, in bf16."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor) -> Tensor:
        """Return the map in bf16."""
        with torch.cuda.device_of(images):
            folded, kernel = fold(images, weight)
            y = convolve(folded, kernel, len(weight))
        ctx.save_for_backward(folded, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        """Return the gradient of the weight."""
        folded, weight = ctx.saved_tensors
        with torch.cuda.device_of(g):
            return None, correlate(folded, aligned(g), weight)


@cache
def warm_up(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile all that batches of any size need."""
    images = torch.zeros(1, 3, 2, 2, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    weight = torch.zeros(channels, 3, 7, 7, dtype=torch.bfloat16, device=device)
    with torch.cuda.device_of(images):
        folded, kernel = fold(images, weight)
        correlate(folded, convolve(folded, kernel, channels), weight)
