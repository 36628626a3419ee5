"""Triton kernels for AdamW: gradients are read where autograd left them, and bf16 copies of the weights are written.

The weights lie in a vector, each at a multiple of 64 numbers, with gaps between them that are left alone; moments and
bf16 copies lie alike. A program has a block of one weight. A table says where the gradients lie: addresses that are
multiples of 16 bytes, plus a number for their type; zero stands for a weight that has no gradient. (The lowest bits of
such an address are free, so one number tells both.)
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202 (triton gives annotations of kernels a meaning of its own)

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednca.kernels.shared import OPTIONS

BLOCK, WARPS = 4096, 8  # numbers of one program
TYPES = {torch.bfloat16: 1, torch.float32: 2}  # of gradients, as they are added to addresses
BF16: tl.constexpr = tl.constexpr(TYPES[torch.bfloat16])
SINGLE: tl.constexpr = tl.constexpr(TYPES[torch.float32])
FIXED = ["step_ptr", "given_ptr", "weights"]  # whose values triton does not compile for


@triton.jit(do_not_specialize=FIXED)
def _begin_step(step_ptr, constants_ptr, rates_ptr, given_ptr, addresses_ptr, weights, WEIGHTS: tl.constexpr):
    step = tl.load(step_ptr) + 1  # one warp reads it at once, and then writes it
    tl.store(step_ptr, step)
    # 1 - beta^step, as 1 - exp(step·log beta), in float64: float32 knows 1 - 0.999 to five digits
    step = step.to(tl.float64)
    correction1 = 1 - tl.exp(step * tl.load(constants_ptr + 1))
    correction2 = 1 - tl.exp(step * tl.load(constants_ptr + 2))
    tl.store(rates_ptr, (tl.load(constants_ptr) / correction1).to(tl.float32))
    tl.store(rates_ptr + 1, (1 / tl.sqrt(correction2)).to(tl.float32))
    # The table may lie in the host's memory. It is fetched once, here, instead of by every program of the next launch.
    at = tl.arange(0, WEIGHTS)
    tl.store(addresses_ptr + at, tl.load(given_ptr + at, mask=at < weights, other=0), mask=at < weights)


@triton.jit
def _move_block(
    w_ptr, m_ptr, v_ptr, copy_ptr, address, first, count, rate, root, decay, beta1, rest1, beta2, rest2, eps,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Move up to BLOCK weights by the gradients from `first` on at an address; WHOLE spares the masks."""
    at = tl.arange(0, BLOCK)
    inside = at < BLOCK if WHOLE else at < count
    kind = tl.zeros([BLOCK], tl.int32) + (address & 3).to(tl.int32)
    start = address - (address & 3)
    bf16_ptr = tl.multiple_of(start.to(tl.pointer_type(tl.bfloat16)), 16) + first
    single_ptr = tl.multiple_of(start.to(tl.pointer_type(tl.float32)), 16) + first
    # One of the two loads reads nothing; which one is known only when the kernel runs.
    narrow = tl.load(bf16_ptr + at, mask=inside & (kind == BF16), other=0.0).to(tl.float32)
    wide = tl.load(single_ptr + at, mask=inside & (kind == SINGLE), other=0.0)
    g = tl.where(kind == SINGLE, wide, narrow)
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    m = beta1 * tl.load(m_ptr + at, mask=inside, other=0.0) + rest1 * g
    v = beta2 * tl.load(v_ptr + at, mask=inside, other=0.0) + rest2 * g * g
    w -= decay * w
    # Rounded as torch rounds; triton's plain division and root of float32 are approximate.
    w -= rate * tl.math.div_rn(m, tl.math.sqrt_rn(v) * root + eps)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    tl.store(w_ptr + at, w, mask=inside)
    tl.store(copy_ptr + at, w.to(tl.bfloat16), mask=inside)


@triton.jit
def _move(
    w_ptr, m_ptr, v_ptr, copy_ptr, blocks_ptr, addresses_ptr, rates_ptr, decay, beta1, rest1, beta2, rest2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block_ptr = blocks_ptr + 4 * tl.program_id(0)
    address = tl.load(addresses_ptr + tl.load(block_ptr))
    # of more than 4, a thread would read 8 of bf16 but 4 of float32, and threads would have to exchange them
    place = tl.multiple_of(tl.load(block_ptr + 1), 4)
    first = tl.multiple_of(tl.load(block_ptr + 2), 4)
    count = tl.load(block_ptr + 3).to(tl.int32)
    rate, root = tl.load(rates_ptr), tl.load(rates_ptr + 1)
    w_ptr, m_ptr, v_ptr, copy_ptr = w_ptr + place, m_ptr + place, v_ptr + place, copy_ptr + place
    if count == BLOCK:
        _move_block(
            w_ptr, m_ptr, v_ptr, copy_ptr, address, first, count, rate, root, decay, beta1, rest1, beta2, rest2, eps,
            BLOCK, WHOLE=True,
        )  # fmt: skip
    else:
        _move_block(
            w_ptr, m_ptr, v_ptr, copy_ptr, address, first, count, rate, root, decay, beta1, rest1, beta2, rest2, eps,
            BLOCK, WHOLE=False,
        )  # fmt: skip


class AdamW:
    """The kernels for weights at fixed places, with the tables that they read."""

    def __init__(
        self,
        pieces: list[tuple[int, int]],
        device: torch.device,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Take each weight's place in the vector and its length."""
        self.blocks = torch.tensor(cut(pieces), dtype=torch.int64, device=device)
        logs = [math.log(beta) if beta else -math.inf for beta in betas]
        self.constants = torch.tensor([lr, *logs], dtype=torch.float64, device=device)
        self.rates = torch.zeros(2, dtype=torch.float32, device=device)
        self.addresses = torch.zeros(len(pieces), dtype=torch.int64, device=device)
        self.scalars = (lr * weight_decay, betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps)

    def step(self, given: Tensor, weights: Tensor, copies: Tensor, state: dict[str, Tensor]) -> None:
        """Take a step along the gradients at the given addresses (N,), which may lie in pinned memory of the host."""
        count = len(self.addresses)
        with torch.cuda.device_of(weights):
            _begin_step[(1,)](
                state["step"], self.constants, self.rates, given, self.addresses, count, triton.next_power_of_2(count),
                num_warps=1, **OPTIONS,
            )  # fmt: skip
            _move[(len(self.blocks),)](
                weights, state["exp_avg"], state["exp_avg_sq"], copies, self.blocks, self.addresses, self.rates,
                *self.scalars, BLOCK, num_warps=WARPS, **OPTIONS,
            )  # fmt: skip


def cut(pieces: list[tuple[int, int]]) -> list[list[int]]:
    """Cut weights into blocks, given as weight, place in the vector, place in the weight and length.

    >>> cut([(0, 5), (64, 4098)])
    [[0, 0, 0, 5], [1, 64, 0, 4096], [1, 4160, 4096, 2]]
    """
    return [
        [weight, place + first, first, min(BLOCK, length - first)]
        for weight, (place, length) in enumerate(pieces)
        for first in range(0, length, BLOCK)
    ]


def address_of(gradient: Tensor | None) -> int:
    """Return where a gradient lies, as the kernels are told."""
    return 0 if gradient is None else gradient.data_ptr() + TYPES[gradient.dtype]


@cache
def warm_up(weights: int, device: torch.device) -> None:
    """Compile what steps of so many weights need, and launch it as a captured step does."""
    vector, first, second = torch.zeros(3, 16 * weights, device=device)
    state = {"step": torch.zeros((), device=device), "exp_avg": first, "exp_avg_sq": second}
    kernels = AdamW([(16 * each, 1) for each in range(weights)], device, 0.1, (0.9, 0.999), 1e-8, 0.0)
    given = torch.zeros(weights, dtype=torch.int64, pin_memory=device.type == "cuda")
    kernels.step(given, vector, torch.zeros_like(vector, dtype=torch.bfloat16), state)
