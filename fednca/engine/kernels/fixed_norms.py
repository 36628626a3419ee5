"""Triton kernel for the way back through BatchNorm with running statistics, and its own squared gradients on that way.

With fixed mean and 1/σ, BatchNorm is x̂·weight + bias, x̂ = (x - mean)/σ. Of the gradient g of a channels-last map, one
program has a sample's places p in some channels: it writes g·weight/σ, and adds up Σ_p g·x̂ and Σ_p g, the sample's own
gradients of weight and bias, in a fixed order, so that a run repeats itself.
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN401 (triton gives annotations of kernels a meaning of its own)

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fednca.engine.kernels import inference
from fednca.engine.kernels.shared import OPTIONS, aligned, block_of, tile_at

ROWS, WARPS = 64, 8  # places of one step of a program
FIXED = ["weight_ptr", "running_mean_ptr", "running_var_ptr", "samples", "places"]  # not what triton compiles for


@triton.jit(do_not_specialize=FIXED)
def _write_gradient(
    x_ptr, g_ptr, dx_ptr, sums_ptr, weight_ptr, running_mean_ptr, running_var_ptr, eps, samples, places, C,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mean = tl.load(running_mean_ptr + cols, mask=cols < C, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(running_var_ptr + cols, mask=cols < C, other=1.0) + eps)
    scale = inverse * tl.load(weight_ptr + cols, mask=cols < C, other=0.0)
    product = tl.zeros([ROWS, COLS], tl.float32)
    plain = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(tl.cdiv(places, ROWS)):
        at, inside = tile_at(sample * places, step, (sample + 1) * places, cols, C, ROWS)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (g * scale[None, :]).to(dx_ptr.dtype.element_ty), mask=inside)
        product += g * (x - mean[None, :])
        plain += g
    tl.store(sums_ptr + sample * C + cols, tl.sum(product, 0) * inverse, mask=cols < C)
    tl.store(sums_ptr + (samples + sample) * C + cols, tl.sum(plain, 0), mask=cols < C)


def backward(x: Tensor, g: Tensor, weight: Tensor, running: list[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the squared gradients of weight and bias (2, C), summed over samples."""
    samples, channels, height, width = x.shape
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    sums = torch.empty(2, samples, channels, dtype=torch.float32, device=x.device)
    block = block_of(channels)
    shape = (samples, height * width, channels, ROWS, block)
    with torch.cuda.device_of(x):
        _write_gradient[(samples, triton.cdiv(channels, block))](
            x, g, dx, sums, weight, *running, eps, *shape, num_warps=WARPS, **OPTIONS
        )
    return dx, sums.square().sum(1)


class FixedNorm(torch.autograd.Function):
    """BatchNorm with running statistics, which tells the squared gradients of its weights instead of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: list[Tensor],
        eps: float,
        tell: Callable[[dict[str, Tensor]], None],
    ) -> Tensor:
        """Normalise."""
        ctx.eps, ctx.tell = eps, tell
        ctx.save_for_backward(x, weight, *running)
        return inference.normalise(x, weight, bias, running, eps, relu=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        x, weight, *running = ctx.saved_tensors
        dx, squares = backward(x, aligned(g), weight, running, ctx.eps)
        ctx.tell({"weight": squares[0], "bias": squares[1]})
        return dx, None, None, None, None, None


def warm_up(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile all that batches of any size need."""
    inference.warm_up(channels, dtype, False, device)
    x = torch.zeros(1, channels, 1, 1, dtype=dtype, device=device)
    weight, mean, var = torch.ones(3, channels, dtype=torch.float32, device=device)
    backward(x, x, weight, [mean, var], 1e-5)
