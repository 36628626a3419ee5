"""Convolutions for the kernel of squared gradients; as a script, what it makes of them in triton's interpreter."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from stem_cases import teach_bf16
from torch import nn

ROUGH = 1e-5  # of the terms of a gradient that they nearly cancel


@dataclass(frozen=True)
class Case:
    """Random inputs of a convolution and gradients of its map."""

    images: tuple[int, int, int, int]  # how many, channels, height and width
    kept: int  # channels of the map
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)

    @property
    def shape(self):
        """What the kernel is told of the convolution."""
        return self.kernel, self.stride, self.padding, self.dilation

    def layer(self):
        """Return the convolution."""
        return nn.Conv2d(self.images[1], self.kept, *self.shape)

    def tensors(self, device="cpu"):
        """Return inputs, a weight and gradients: float64 numbers that bf16 can hold."""
        rng = torch.Generator(device).manual_seed(0)

        def some(*shape):
            made = torch.randn(shape, generator=rng, dtype=torch.float64, device=device) + 0.1
            return made.bfloat16().double()

        x, weight = some(*self.images), some(self.kept, self.images[1], *self.kernel)
        return x, weight, some(*F.conv2d(x, weight, None, *self.shape[1:]).shape)

    def given(self, device="cpu"):
        """Return inputs and gradients as the kernel takes them."""
        x, _, g = self.tensors(device)
        return [each.bfloat16().to(memory_format=torch.channels_last) for each in (x, g)]


CASES = {
    "3x3": Case((5, 64, 9, 11), 20),
    "3x3, two apart": Case((3, 64, 9, 12), 16, stride=(2, 2)),
    "1x1, two apart": Case((4, 128, 7, 6), 24, (1, 1), (2, 2), (0, 0)),
    "7x7 of images": Case((4, 3, 17, 22), 16, (7, 7), (2, 2), (3, 3)),
    "dilated": Case((3, 5, 13, 10), 20, padding=(2, 2), dilation=(2, 2)),
    "not square": Case((2, 7, 13, 10), 33, (3, 5), (2, 1), (1, 3), (2, 1)),
    "many channels": Case((2, 48, 5, 5), 140, (1, 1), padding=(0, 0)),
    "one sample": Case((1, 5, 9, 9), 20),
    "more samples than parts": Case((11, 3, 5, 4), 16),
    "one place": Case((3, 16, 3, 3), 16, padding=(0, 0)),
    "one channel": Case((3, 1, 6, 5), 1),
}


def expected(case, device="cpu"):
    """Return the sum of squared gradients (Cout, R, S, Cin) by a loop over samples, and how far rounding can take it.

    Where the absolute values of a gradient's terms have the sum s, and it is wrong by ε·s, then g² is by 2·ε·|g|·s.
    """
    x, weight, g = case.tensors(device)
    total, sums = torch.zeros_like(weight), torch.zeros_like(weight)
    for n in range(len(x)):
        one = slice(n, n + 1)
        gradient = _gradient(case, x[one], weight, g[one])
        terms = _gradient(case, x[one].abs(), weight, g[one].abs())
        total += gradient**2
        sums += (2 * gradient.abs() + ROUGH * terms) * terms
    return total.permute(0, 2, 3, 1), sums.permute(0, 2, 3, 1)


def _gradient(case, x, weight, g):
    weight = weight.clone().requires_grad_()
    y = F.conv2d(x, weight, None, *case.shape[1:])
    return torch.autograd.grad(y, weight, g)[0]


def main(path: str) -> None:
    """Save what the kernel makes of all cases, and what the Fisher diagonal makes of it."""
    from fednca.engine import fuse, fused
    from fednca.engine.kernels import squares
    from fednca.fisher import squares_of_convolution

    teach_bf16()
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds NaN
    squares.PROGRAMS = 4  # so that a program has several samples
    found = {name: squares.squares(*case.given(), *case.shape) for name, case in CASES.items()}
    found["again"] = {name: squares.squares(*case.given(), *case.shape) for name, case in CASES.items()}

    fused.DEVICE, fuse.available = "cpu", lambda: True
    case = CASES["dilated"]
    layer, (x, _, g), used = case.layer(), case.tensors(), []
    multiply = squares.squares
    squares.squares = lambda *given: used.append(len(given[0])) or multiply(*given)
    found["layer"] = squares_of_convolution(layer, x.float(), g.bfloat16())  # neither of them channels last
    found["layer again"] = squares_of_convolution(layer, *case.given())
    found["used"] = used
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
