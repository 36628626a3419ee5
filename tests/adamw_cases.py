"""Weights and gradients for AdamW in one kernel; as a script, what it makes of them in triton's interpreter.

The interpreter runs kernels on a CPU, and must be chosen before triton is imported: hence a process of its own.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from helpers import tiny
from parity import play, start

from fednca.base.tensors import Layout, Packed
from fednca.engines.eager import EagerEngine
from fednca.engines.graphs import one_kernel
from fednca.engines.graphs.engine import GraphEngine
from fednca.engines.optimizer import VectorOptimizer
from fednca.methods import find_method

MARK = 7.0  # in gaps between weights, which nobody may touch
LONG = 2 * 4096 + 7  # numbers: two whole blocks of the kernel, and some
SHAPES = {
    "conv": (20, 3, 5, 7),
    "missing": (37, 3),
    "long": (LONG,),
    "long, bf16": (3, LONG),
    "whole": (2, 4096),
    "scalar": (),
    "point": (16, 24, 1, 1),
    "transposed": (24, 40),
    "expanded": (5, 9),
    "misaligned": (33,),
    "double": (8, 8),
    "last": (65,),
}
SINGLE = {"long", "scalar", "expanded", "last"}  # the others' gradients are bf16
OPTIONS = {
    "the usual": {},
    "strong decay": {"train__lr": 0.05, "train__weight_decay": 0.3, "train__betas": [0.8, 0.95]},
    "no memory": {"train__betas": [0.0, 0.0], "train__weight_decay": 0.0},
}
STEPS = 5
ROUNDS = {"fedavg": True, "scaffold": True, "fedprox": False}  # whether the kernel takes the steps: not with penalties
UNEQUAL = {"partition__beta": 0.3, "partition__clients": 4, "train__precision": "bf16"}


@dataclass
class Setting:
    """Weights with an optimiser, and their bf16 copies."""

    values: Packed
    optimizer: VectorOptimizer
    copies: Packed

    @classmethod
    def build(cls, options, device="cpu"):
        """Draw weights; copies and gaps hold a mark."""
        rng = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
        values = Packed.zeros(Layout.of(tensors), torch.device(device))
        values.vectors[torch.float32].fill_(MARK)
        values.load(tensors)
        copies = Packed.zeros(Layout.of({name: t.bfloat16() for name, t in tensors.items()}), torch.device(device))
        copies.vectors[torch.bfloat16].fill_(MARK)
        optimizer = VectorOptimizer(values, list(SHAPES), tiny(**options).train, find_method("fedavg"))
        return cls(values, optimizer, copies)

    def vectors(self):
        """Return all that a step may change."""
        state = {name: tensor.clone() for name, tensor in self.optimizer.state.items()}
        copies = self.copies.vectors[torch.bfloat16].clone()
        return state | {"weights": self.values.vectors[torch.float32].clone(), "copies": copies}


def gradients(step, device="cpu"):
    """Return a step's gradients: some lie in memory otherwise than their weights do, one is missing but at first."""
    rng = torch.Generator().manual_seed(step + 1)
    found = {}
    for name, shape in SHAPES.items():
        drawn = torch.randn(shape, generator=rng) * 10.0 ** (step % 3 - 2)
        drawn = (drawn if name in SINGLE else drawn.bfloat16()).to(device)
        found[name] = drawn.to(memory_format=torch.channels_last) if name == "conv" else drawn
    found["missing"] = None if step else found["missing"]
    found["transposed"] = found["transposed"].t().contiguous().t()
    found["expanded"] = found["expanded"][:1].expand(5, 9)
    found["misaligned"] = torch.cat([found["misaligned"][:1], found["misaligned"]])[1:]
    found["double"] = found["double"].double()
    return found


def prepare(options, device="cpu"):
    """Return weights and the kernel that moves them."""
    setting = Setting.build(options, device)
    return setting, one_kernel.OneKernel(setting.optimizer, setting.copies.vectors[torch.bfloat16])


def with_kernel(options, device="cpu"):
    """Return what some steps of the kernel make."""
    setting, kernel = prepare(options, device)
    for step in range(STEPS):
        kernel.step(list(gradients(step, device).values()))
    return setting.vectors()


def expected(options):
    """Return the config, and weights and moments by name after some steps of torch's AdamW in float64."""
    config = tiny(**options).train
    weights = {name: torch.nn.Parameter(weight.double()) for name, weight in Setting.build(options).values.items()}
    own = {"lr": config.lr, "weight_decay": config.weight_decay, "betas": config.betas or (0.9, 0.999)}
    optimizer = torch.optim.AdamW(list(weights.values()), **own, foreach=False)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            weights[name].grad = torch.zeros_like(weights[name]) if gradient is None else gradient.double()
        optimizer.step()
    found = {name: {"weights": weight.detach(), **optimizer.state[weight]} for name, weight in weights.items()}
    return config, found


def assert_is_torchs(found, options):
    """Compare weights and moments with torch's in float64, copies with the weights, and gaps with what they were."""
    config, reference = expected(options)
    found = {name: tensor.cpu() for name, tensor in found.items()}
    assert float(found["step"]) == STEPS
    layout = Setting.build(options).optimizer.gradients.layout
    gaps = torch.ones_like(found["weights"], dtype=torch.bool)
    for mine in Packed(layout, {torch.float32: gaps}).values():
        mine.fill_(False)
    assert gaps.any()
    assert (found["weights"][gaps] == MARK).all()
    assert (found["copies"][gaps] == MARK).all()
    assert (found["exp_avg"][gaps] == 0).all()
    assert torch.equal(found["copies"][~gaps], found["weights"][~gaps].bfloat16())
    for key, atol in (("weights", 1e-6 + 1e-5 * config.lr), ("exp_avg", 1e-8), ("exp_avg_sq", 1e-12)):
        by_name = Packed(layout, {torch.float32: found[key]})
        for name, tensors in reference.items():
            torch.testing.assert_close(
                by_name[name].double(),
                tensors[key],
                rtol=1e-6,
                atol=atol,
                msg=lambda text, name=name, key=key: f"{key} of {name}: {text}",
            )


def round_of(name):
    """Return the server before and after a round, and how often the kernel was used in it."""
    place, server = start(tiny(**UNEQUAL, method__name=name, train__batch_size=32))
    before = play(EagerEngine(place), server, 1)
    with mock.patch.object(one_kernel.OneKernel, "step", autospec=True, side_effect=one_kernel.OneKernel.step) as step:
        after = play(GraphEngine(place, 1), before.server, 1, before.states, first=2)
    return before.server, after.server, step.call_count


def interpret(path: Path) -> dict:
    """Run this script in the interpreter, and return what it saved."""
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder.parent), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-W", "error", __file__, str(path)], env=environment, check=True)
    return torch.load(path)


def _teach_rounding() -> None:
    """Let the interpreter round to bf16 as a GPU does; it cuts bits off."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cut = InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cut(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_fp_trunc = create_fp_trunc


def main(path: str) -> None:
    """Save what the kernel makes of all cases, and of rounds."""
    _teach_rounding()
    found = {("steps", name): with_kernel(options) for name, options in OPTIONS.items()}
    one_kernel.DEVICE = "cpu"
    with mock.patch.object(one_kernel, "available", return_value=True):
        for name in ROUNDS:
            _, after, used = round_of(name)
            found["round", name] = {"weights": dict(after.weights), "used": used}
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
