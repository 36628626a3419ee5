"""What several kernels have in common: how a map is cut into tiles, and what a normalised tile is."""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 (triton gives annotations of kernels a meaning of its own)

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64  # that a program has, at most
OPTIONS = {"enable_fp_fusion": True}  # the default is not the same in all versions of triton


@triton.jit
def tile_at(start, step, stop, cols, C, ROWS: tl.constexpr):
    """Return the offsets (ROWS, COLS) of a tile, and which of them are inside.

    The tile is that of a program's `step`: ROWS rows of a channels-last map with C channels, which ends before `stop`.
    """
    rows = start + step * ROWS + tl.arange(0, ROWS)
    return rows[:, None] * C + cols[None, :], (rows < stop)[:, None] & (cols < C)[None, :]


@triton.jit
def write_tile(
    x_ptr, shortcut_ptr, y_ptr, at, inside, mean, scale, bias, ADD: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """Normalise a tile, add the shortcut's, and write it."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    if ADD:
        y += tl.load(shortcut_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # unlike a maximum, this lets NaN through
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def block_of(channels: int) -> int:
    """Return how many channels a program has."""
    # The sides of triton's tiles are powers of two, and what tensor cores multiply has at least 16.
    return min(CHANNELS, max(16, int(triton.next_power_of_2(channels))))


def cut(rows: int, programs: int, step: int) -> tuple[int, int]:
    """Return how many rows each program has, in whole steps, and how many programs that makes.

    >>> cut(1000, 4, 128)
    (256, 4)
    """
    each = -(-rows // (max(1, programs) * step)) * step
    return each, -(-rows // each)


def aligned(g: Tensor) -> Tensor:
    """Return a gradient as kernels were compiled for: channels last, at an address that is a multiple of 16."""
    g = g.contiguous(memory_format=torch.channels_last)
    return g.clone(memory_format=torch.preserve_format) if g.data_ptr() % 16 else g
