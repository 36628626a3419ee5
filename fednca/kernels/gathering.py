"""Triton kernel that takes images out of a resident uint8 array and normalises them, in one launch.

Torch would copy the rows, convert them, subtract and divide, and write the whole batch to memory each time. An image
lies in memory as H·W·3 bytes, and in the batch as that many numbers in the same order. Stores are larger than 32 bits
can count, hence the 64 bits of rows and of the image's place in the batch.
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202 (triton gives annotations of kernels a meaning of its own)

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednca.kernels.shared import OPTIONS

BYTES, WARPS = 1024, 4  # of one program
FIXED = ["rows_ptr", "mean_ptr", "std_ptr"]  # whose addresses triton does not compile for


@triton.jit
def _of_channel(table_ptr, channel):
    """Return the channels' numbers out of three."""
    rest = tl.where(channel == 1, tl.load(table_ptr + 1), tl.load(table_ptr + 2))
    return tl.where(channel == 0, tl.load(table_ptr), rest)


@triton.jit(do_not_specialize=FIXED)
def _write_images(pixels_ptr, rows_ptr, mean_ptr, std_ptr, y_ptr, length, BYTES: tl.constexpr):
    pieces = tl.cdiv(length, BYTES)
    image = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * BYTES + tl.arange(0, BYTES)
    pixel = tl.load(pixels_ptr + tl.load(rows_ptr + image) * length + at, mask=at < length, other=0).to(tl.float32)
    channel = at % 3
    y = tl.math.div_rn(pixel - _of_channel(mean_ptr, channel), _of_channel(std_ptr, channel))  # rounded as torch rounds
    tl.store(y_ptr + image * length + at, y, mask=at < length)


def gather(pixels: Tensor, rows: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return rows of pixels (N, H, W, 3), normalised by mean and std (3,): float32 (B, 3, H, W), channels last."""
    _, height, width, channels = pixels.shape
    length = height * width * channels
    y = torch.empty(len(rows), height, width, channels, dtype=torch.float32, device=pixels.device)
    with torch.cuda.device_of(pixels):
        _write_images[(len(rows) * triton.cdiv(length, BYTES),)](
            pixels, rows, mean, std, y, length, BYTES, num_warps=WARPS, **OPTIONS
        )
    return y.permute(0, 3, 1, 2)


@cache
def warm_up(height: int, width: int, device: torch.device) -> None:
    """Compile what batches of images of this size need."""
    pixels = torch.zeros(1, height, width, 3, dtype=torch.uint8, device=device)
    mean, std = torch.ones(2, 3, dtype=torch.float32, device=device)
    gather(pixels, torch.zeros(1, dtype=torch.int64, device=device), mean, std)
