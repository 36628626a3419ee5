"""From a config to the parts of a run."""

import numpy as np
import pytest
import torch
from helpers import tiny

from fednca.engines.images import HALF, IMAGENET
from fednca.engines.model import build_model
from fednca.engines.workplace import build_store
from fednca.methods import create_method


def test_the_seed_decides_the_first_weights():
    configs = [tiny(seed=seed) for seed in (0, 0, 1)]
    models = [build_model(config, create_method(config), tuple("ab"), pretrained="none") for config in configs]
    first, again, other = (next(model.parameters()) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("pretrained", "normalize", "moments"),
    [
        ("none", "auto", HALF),
        ("timm", "auto", IMAGENET),
        ("timm", "half", HALF),
        ("none", "imagenet", IMAGENET),
    ],
)
def test_images_are_normalised_as_the_backbones_weights_want_them(pretrained, normalize, moments):
    config = tiny(model__pretrained=pretrained, data__normalize=normalize)
    store = build_store(config, np.zeros((1, 16, 16, 3), np.uint8), torch.device("cpu"))
    for found, known in zip((store.mean, store.std), moments, strict=True):
        torch.testing.assert_close(found / 255, torch.tensor(known, dtype=found.dtype))
