"""Triton kernel for the squared gradients of a convolution's weight, summed over samples: each sample's own gradient.

With x (B, H, W, Cin) and the gradient g of the map (B, H'·W', Cout), both in bf16, the gradient of sample n has one row
per output channel and one column per tap and input channel (r, s, c): Σ_p g[n, p, o]·x[n, place(p, r, s), c], a sum
over the places p of the map. A program has a tile of it and some of the samples; it adds up a sample's places with
tensor cores and keeps only the sum of the squares. Those sums are added in a fixed order, so that a run repeats itself.
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202 (triton gives annotations of kernels a meaning of its own)

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednca.engine.kernels.shared import OPTIONS, cut

LARGE, SMALL = 128, 64  # rows or columns of a program's tile, at most, and columns where they cannot share a tap
PLACES = 64  # of one step of a program, at most
PROGRAMS = 528  # that share the samples, at most, where the tiles are not more
WARPS, LARGE_WARPS, STAGES = 4, 8, 3

# What triton would otherwise compile for anew: numbers that depend on the batch or the shape of the convolution
FIXED = [
    "samples", "per_part", "height", "width", "places", "columns", "taps_across",
    "down", "right", "top", "left", "apart_down", "apart_right",
]  # fmt: skip

Pair = tuple[int, ...]  # of two numbers: down and across


@triton.jit(do_not_specialize=FIXED)
def _square(
    x_ptr, g_ptr, partials_ptr, samples, per_part, height, width, places, columns, taps_across,
    down, right, top, left, apart_down, apart_right, C, K,
    ACROSS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    out = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tap = tl.program_id(0) * COLS // C if SHARED else (column // C)[None, :]  # shared by all columns of the tile
    below = tap // taps_across * apart_down - top  # from a place of the map to what the tap sees of x
    beside = tap % taps_across * apart_right - left
    shift = (below * width + beside - tap) * C + column[None, :]
    start = tl.program_id(2) * per_part
    steps = tl.cdiv(places, PLACES)
    gradient = tl.zeros([ROWS, COLS], tl.float32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for step in range((tl.minimum(start + per_part, samples) - start) * steps):
        sample = start + step // steps
        place = step % steps * PLACES + tl.arange(0, PLACES)
        known = (place < places)[:, None]
        y = (place // ACROSS * down)[:, None]
        x = (place % ACROSS * right)[:, None]
        seen = known & (y + below >= 0) & (y + below < height) & (x + beside >= 0) & (x + beside < width)
        patch = tl.load(x_ptr + ((sample * height + y) * width + x) * C + shift, mask=seen, other=0.0)
        at = (sample * places + place)[:, None] * K + out[None, :]
        g = tl.load(g_ptr + at, mask=known & (out < K)[None, :], other=0.0)
        gradient = tl.dot(tl.trans(g), patch, gradient)
        if step % steps == steps - 1:  # the sample's last places
            total += gradient * gradient
            gradient = tl.zeros([ROWS, COLS], tl.float32)
    at = (tl.program_id(2) * K + out)[:, None] * columns + column[None, :]
    tl.store(partials_ptr + at, total, mask=(out < K)[:, None] & (column < columns)[None, :])


def squares(x: Tensor, g: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Return Σ_n (Σ_p g·x)², (Cout, R, S, Cin) in float32; x: (B, Cin, H, W), g: (B, Cout, H', W'), channels last."""
    samples, channels, height, width = x.shape
    kept, across, places = g.shape[1], g.shape[3], g.shape[2] * g.shape[3]
    columns = kernel_size[0] * kernel_size[1] * channels
    shared, cols = columns_of_tile(channels, columns)
    rows = power_of_two(kept, LARGE)
    tiles = (triton.cdiv(columns, cols), triton.cdiv(kept, rows))
    per_part, parts = cut(samples, PROGRAMS // (tiles[0] * tiles[1]), 1)
    partials = torch.empty(parts, kept, *kernel_size, channels, dtype=torch.float32, device=x.device)
    shape = (samples, per_part, height, width, places, columns, kernel_size[1], *stride, *padding, *dilation)
    tile = (across, shared, rows, cols, power_of_two(places, PLACES))
    warps = WARPS if rows * cols <= LARGE * SMALL else LARGE_WARPS
    with torch.cuda.device_of(x):
        _square[(*tiles, parts)](
            x, g, partials, *shape, channels, kept, *tile, num_warps=warps, num_stages=STAGES, **OPTIONS
        )
    return partials.sum(0)


def columns_of_tile(channels: int, columns: int) -> tuple[bool, int]:
    """Tell whether all columns of a tile can share a tap, and return how many they are."""
    for cols in (LARGE, SMALL):
        if channels % cols == 0:
            return True, cols
    return False, power_of_two(columns, SMALL)


def power_of_two(length: int, most: int) -> int:
    """Return the smallest side of a tile that has room for a length, or the largest that is allowed."""
    return min(most, max(16, int(triton.next_power_of_2(length))))


def warm_up(image: torch.Size, seen: torch.Size, shape: tuple[Pair, ...], device: torch.device) -> None:
    """Compile what batches of any size need, for inputs and maps of these shapes without the samples."""
    x, g = (torch.zeros(1, *size, dtype=torch.bfloat16, device=device) for size in (image, seen))
    x, g = (each.contiguous(memory_format=torch.channels_last) for each in (x, g))
    squares(x, g, *shape)
