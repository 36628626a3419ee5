"""Images for the kernels of a ResNet's first convolution; as a script, what they make of them in triton's interpreter.

The interpreter runs kernels on a CPU, and must be chosen before triton is imported: hence a process of its own.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Case:
    """Random images, a weight and a gradient."""

    images: tuple[int, int, int]  # how many, height and width
    channels: int = 64
    dtype: torch.dtype = torch.float32  # of the images
    weight: torch.dtype = torch.bfloat16  # and of its gradient, then
    planes: bool = False  # of the weight, instead of channels last
    rows: int = 2  # of the map in one step of the gradient

    def tensors(self, device="cpu"):
        """Return images, weight and gradient of the map: float64 numbers that bf16 can hold."""
        rng = torch.Generator(device).manual_seed(0)
        count, height, width = self.images
        shapes = [(count, 3, height, width), (self.channels, 3, 7, 7), (count, self.channels, height // 2, width // 2)]
        made = [torch.randn(shape, generator=rng, dtype=torch.float64, device=device) + 0.1 for shape in shapes]
        return [tensor.bfloat16().double() for tensor in made]

    def given(self, device="cpu"):
        """Return the same as the kernels take them."""
        images, weight, g = self.tensors(device)
        images = images.to(self.dtype).to(memory_format=torch.channels_last)
        weight = weight.to(self.weight)
        weight = weight if self.planes else weight.to(memory_format=torch.channels_last)
        return images, weight, g.bfloat16().to(memory_format=torch.channels_last)


CASES = {
    "one block": Case((1, 2, 2), 16, rows=1),
    "one image": Case((1, 8, 12)),
    "tiles over several images": Case((5, 14, 34), weight=torch.float32),
    "tiles over several images, bf16": Case((3, 10, 46), 32, torch.bfloat16, planes=True),
    "three quarters of the channels": Case((2, 10, 18), 48, torch.bfloat16, torch.float32, planes=True, rows=4),
    "one row": Case((3, 2, 46), 16, weight=torch.float32),
    "one column": Case((2, 26, 2), 32, weight=torch.float32, rows=4),
    "wide": Case((1, 4, 142), 16, weight=torch.float32, rows=1),
}


def expected(case, device="cpu"):
    """Return the map and the gradient of the weight in float64, and the sums of their terms' absolute values."""
    images, weight, g = case.tensors(device)
    return _both(images, weight, g), _both(images.abs(), weight.abs(), g.abs())


def _both(images, weight, g):
    weight = weight.clone().requires_grad_()
    y = F.conv2d(images, weight, stride=2, padding=3)
    return {"y": y.detach(), "weight": torch.autograd.grad(y, weight, g)[0]}


def outcome(images, weight, g):
    """Return what the kernels make in training: the map and the gradient of the weight."""
    from fednca.kernels import stem

    weight = weight.clone().requires_grad_()
    y = stem.StemConv.apply(images, weight)
    return {"y": y.detach(), "weight": torch.autograd.grad(y, weight, g)[0]}


def assert_within(found, reference, sums, rounding, accumulation):
    """Compare; every number may be apart by a share of itself and one of the sum of its terms' absolute values."""
    apart = (found.double() - reference).abs() - rounding * reference.abs() - accumulation * sums
    assert float(apart.max()) <= 0  # NaN fails too


def interpret(path: Path) -> dict:
    """Run this script in the interpreter, and return what it saved."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__, str(path)], env=environment, check=True)
    return torch.load(path)


def teach_bf16() -> None:
    """Let the interpreter's dot take bf16 for what it is; it multiplies the bits as if they were integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def widened(handle):
        assert handle.dtype.scalar == tl.bfloat16
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *others):
        return multiply(self, widened(a), widened(b), *others)

    InterpreterBuilder.create_dot = create_dot


def main(path: str) -> None:
    """Save what the kernels make of all cases."""
    from fednca.kernels import stem

    teach_bf16()
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds NaN
    stem.FOLD_BLOCKS, stem.FORWARD_ROWS, stem.SPLITS, stem.JOIN_SPLITS = 16, 4, 5, 2  # so that there are several
    found = {}
    for name, case in CASES.items():
        stem.BACKWARD_ROWS = case.rows
        found[name] = outcome(*case.given())
    images, weight, g = CASES["one image"].given()
    found["gradient in planes"] = outcome(images, weight, g.contiguous())
    with torch.inference_mode():
        found["evaluation"] = stem.StemConv.apply(images, weight)
    found["folded"] = stem.fold(images, weight)[0]
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
