"""Maps and images for kernels of our own; as a script, what the kernels make of them in triton's interpreter.

The interpreter runs kernels on a CPU, and must be chosen before triton is imported: hence a process of its own.
"""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from fednca.kernels import fusion, layers


@dataclass(frozen=True)
class Map:
    """A random map, and what is special about it."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    mean: float = 0.3
    relu: bool = True
    at_once: bool = False  # in one launch
    constant: bool = False  # in some channels

    def tensors(self, device="cpu"):
        """Return input and gradient of the output, channels last; float64 numbers that the type can hold."""
        rng = torch.Generator(device).manual_seed(0)
        x, g = (torch.randn(self.shape, generator=rng, dtype=torch.float64, device=device) for _ in range(2))
        x += self.mean
        if self.constant:
            x[:, ::2] = self.mean
        return [t.to(self.dtype).double().to(memory_format=torch.channels_last) for t in (x, g)]


NORMS = {
    "one program": Map((3, 64, 5, 7)),
    "one program, bf16": Map((3, 64, 5, 7), torch.bfloat16),
    "several steps": Map((3, 64, 19, 23)),
    "several steps, bf16": Map((3, 64, 19, 23), torch.bfloat16),
    "odd channels": Map((5, 20, 43, 9)),
    "several blocks": Map((2, 128, 9, 11), relu=False),
    "few rows": Map((2, 512, 1, 1), relu=False),
    "far from zero": Map((3, 20, 19, 23), mean=1000, relu=False),
    "constant": Map((3, 16, 13, 11), mean=3, relu=False, constant=True),
    "at once": Map((5, 20, 43, 7), at_once=True),
    "at once, bf16": Map((5, 64, 19, 17), torch.bfloat16, at_once=True),
    "at once, few rows": Map((2, 512, 1, 1), relu=False, at_once=True),
    "at once, far from zero": Map((5, 20, 21, 19), mean=1000, relu=False, at_once=True),
    "at once, constant": Map((3, 16, 13, 11), mean=3, relu=False, at_once=True, constant=True),
}
POOLS = {
    "even": Map((2, 64, 8, 12)),
    "odd": Map((2, 20, 7, 37)),
    "odd, bf16": Map((2, 64, 9, 33), torch.bfloat16),
    "one pixel": Map((3, 16, 1, 1)),
    "one row": Map((1, 128, 1, 6)),
}
EVALUATED = {name: case for name, case in NORMS.items() if not case.at_once}  # there is one launch in any case
SUMS = ("one program, bf16", "odd channels", "at once")
POOLED_IN_EVALUATION = ("odd, bf16", "one pixel")  # the interpreter is slow


def norm(case, device="cpu"):
    """Return a BatchNorm in float64 with weights of its own."""
    rng = torch.Generator().manual_seed(1)
    module = nn.BatchNorm2d(case.shape[1], momentum=0.3, eps=1e-4, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
            tensor.copy_(torch.rand(tensor.shape, generator=rng).float() - 0.3)
    return module.to(device)


def norm_in_evaluation(case, device="cpu"):
    """Return a BatchNorm in float64 that has seen something before."""
    module = norm(case, device).eval()
    module.running_var.abs_()
    return module


class Sum(nn.Module):
    """A BatchNorm, a shortcut that is made of its input as well, and a ReLU."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        shortcut = x.flip(0).contiguous(memory_format=torch.channels_last)
        if isinstance(self.norm, layers.FusedBatchNorm2d):
            return self.norm(x, shortcut)
        return (self.norm(x) + shortcut).relu()


@contextmanager
def no_operations_of_torch():
    """Fail where torch normalises or pools."""
    with (
        torch.no_grad(),
        mock.patch.object(nn.functional, "batch_norm", side_effect=AssertionError),
        mock.patch.object(nn.functional, "max_pool2d", side_effect=AssertionError),
    ):
        yield


def with_kernels(module, case, relu=False):
    """Return a copy of a module that uses the kernels for this map, and does the ReLU behind it if asked to."""
    model = nn.Sequential(copy.deepcopy(module).to(torch.float32), nn.ReLU(inplace=True))
    seen = {"0": fusion.Input(case.shape[1], case.dtype)}
    plan = fusion.Plan(norms=seen) if isinstance(module, nn.BatchNorm2d) else fusion.Plan(pools=seen)
    if relu:
        plan.relus["0"] = "1"
    return fusion.accelerate(model, plan)[0]


def outcome(module, x, g, then=None):
    """Return all that a training step through a module makes, in float64."""
    x = x.clone().requires_grad_()
    y = module(x) if then is None else then(module(x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    names = [name for name, _ in module.named_parameters()]
    gradients = torch.autograd.grad(y, [x, *module.parameters()], g)
    found = {"y": y.detach(), **dict(zip(["x", *names], gradients, strict=True))}
    found |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return found


def with_ties(case, device="cpu"):
    """Return a map as it comes out of a ReLU, half of it zeros, and a gradient."""
    x, g = case.tensors(device)
    return x.relu(), g[:, :, : (x.shape[2] + 1) // 2, : (x.shape[3] + 1) // 2]


def odd_values():
    """Return a map with NaN and minus infinity."""
    x, g = POOLS["odd"].tensors()
    x[0, :, 2:6, 4:9] = -torch.inf
    x[0, :, :3, :3] = -torch.inf  # all there is in the windows of the corner
    x[1, :, 3, 3:5] = torch.nan
    return x, g[:, :, :4, :19]


class Net(nn.Module):
    """A stem with a pool, and a residual block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.stem(x)
        y = self.block(x)
        y += x
        return self.act(y)


def net():
    """Return the network and a batch."""
    torch.manual_seed(0)
    images = torch.randn(3, 3, 15, 17).to(memory_format=torch.channels_last)
    return Net().to(memory_format=torch.channels_last).train(), images


def train(model, images):
    """Return output, gradients and buffers of a step."""
    y = model(images)
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True)), **dict(model.named_buffers())}


def operations(y):
    """Return the names of the operations that made a tensor."""
    names, waiting = set(), [y.grad_fn]
    while waiting:
        operation = waiting.pop()
        if operation is not None:
            names.add(operation.name())
            waiting += [parent for parent, _ in operation.next_functions]
    return names


def assert_near(found, expected, share):
    """Compare tensors by name; they may be apart by this share of the largest expected value."""
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        reference = reference.double()
        largest = float(reference.abs().max())
        torch.testing.assert_close(
            found[name].double(),
            reference,
            rtol=0,
            atol=share * largest + 1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def interpret(path: Path) -> dict:
    """Run this script in the interpreter, and return what it saved."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__, str(path)], env=environment, check=True)
    return torch.load(path)


def main(path: str) -> None:
    """Save what the kernels make of all maps and images."""
    from fednca.kernels import norms

    layers.DEVICE = "cpu"
    norms.REDUCE_PROGRAMS, norms.WRITE_PROGRAMS = 4, 6  # so that small maps take several steps
    found = {}
    for name, case in NORMS.items():
        norms.SMALL = norms.SMALL_PER_CHANNEL = 10**9 if case.at_once else 0
        x, g = (t.to(case.dtype) for t in case.tensors())
        found["norm", name] = outcome(with_kernels(norm(case), case, case.relu), x, g)
        if name in SUMS:
            found["sum", name] = outcome(Sum(with_kernels(norm(case), case, relu=True)), x, g)
            with no_operations_of_torch():
                found["sum in evaluation", name] = Sum(with_kernels(norm_in_evaluation(case), case, relu=True))(x)
    for name, case in EVALUATED.items():
        with no_operations_of_torch():
            module = with_kernels(norm_in_evaluation(case), case, case.relu)
            found["norm in evaluation", name] = module(case.tensors()[0].to(case.dtype))
    pool = nn.MaxPool2d(3, 2, 1)
    for name, case in POOLS.items():
        x, g = (t.to(case.dtype) for t in with_ties(case))
        found["pool", name] = outcome(with_kernels(pool, case), x, g)
    x, g = (t.float() for t in odd_values())
    found["pool", "odd values"] = outcome(with_kernels(pool, POOLS["odd"]), x, g)
    with no_operations_of_torch():
        found["pool in evaluation", "odd values"] = with_kernels(pool, POOLS["odd"]).eval()(x)
    for name in POOLED_IN_EVALUATION:
        with no_operations_of_torch():
            module = with_kernels(pool, POOLS[name]).eval()
            found["pool in evaluation", name] = module(with_ties(POOLS[name])[0][:1].to(POOLS[name].dtype))
    model, images = net()
    watched = copy.deepcopy(model)
    fusion.accelerate(model, fusion.watch(watched, lambda: watched(images)))
    found["net", "operations"] = operations(copy.deepcopy(model)(images))
    found["net", "step"] = train(model, images)
    with no_operations_of_torch():
        found["net", "scores"] = model.eval()(images[:1])
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
