"""The optimiser of all weights at once against torch's, weight by weight."""

import pytest
import torch

from fednca.base.tensors import Layout, Packed
from fednca.config import TrainConfig
from fednca.engines.optimizer import OPTIMIZER, VectorOptimizer
from fednca.methods import find_method

SHAPES = {"a": (5, 3, 3, 3), "b": (7,), "c": (4, 6)}


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "adamw", "betas": (0.8, 0.99)}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}],
    ids=["adamw", "sgd", "momentum"],
)
def test_steps_and_what_is_kept_are_those_of_torchs_optimiser(options):
    config = TrainConfig(lr=0.01, weight_decay=0.1, **options)
    rng = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, dtype=torch.float64, generator=rng) for name, shape in SHAPES.items()}
    packed = Packed.zeros(Layout.of(weights), torch.device("cpu"))
    packed.load(weights)
    ours = VectorOptimizer(packed, list(weights), config, find_method("fedavg"))
    own = {"lr": 0.01, "weight_decay": 0.1}
    if config.optimizer == "adamw":
        theirs = torch.optim.AdamW(weights.values(), betas=config.betas, **own)
    else:
        theirs = torch.optim.SGD(weights.values(), momentum=config.momentum, **own)
    for _ in range(4):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, dtype=torch.float64, generator=rng)
        ours.take([weight.grad for weight in weights.values()])
        ours.step()
        theirs.step()
    torch.testing.assert_close(dict(packed), {name: weight.detach() for name, weight in weights.items()})
    expected = {
        f"{OPTIMIZER}{name}/{key}": value
        for name, weight in weights.items()
        for key, value in theirs.state[weight].items()
        if value is not None
    }
    torch.testing.assert_close(ours.dump(), expected, check_dtype=False)
