"""Models as a config names them."""

import torch
from helpers import tiny

from fednca.engines.model import build_model
from fednca.methods import create_method


def test_the_seed_decides_the_first_weights():
    configs = [tiny(seed=seed) for seed in (0, 0, 1)]
    models = [build_model(config, create_method(config), tuple("ab"), pretrained="none") for config in configs]
    first, again, other = (next(model.parameters()) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
