"""Tiny trained runs, one per method, shared by all tests of their use."""

from functools import cache

import numpy as np
import pytest
from helpers import tiny
from PIL import Image

from fednca.runs import Run, train
from fednca.use.model import TrainedModel


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Return a function from a method's name to a finished run of it."""

    @cache
    def trained(method: str) -> Run:
        return train(tiny(method__name=method), tmp_path_factory.mktemp("runs") / method)

    return trained


@pytest.fixture(scope="session")
def run(run_of) -> Run:
    return run_of("fednca-ml")


@pytest.fixture(scope="session")
def model(run) -> TrainedModel:
    return TrainedModel(run)


@pytest.fixture(scope="session")
def test_images(run) -> np.ndarray:
    """The run's test images (N, 16, 16, 3)."""
    return run.federation.dataset.test.images


@pytest.fixture(scope="session")
def image_folder(test_images, tmp_path_factory):
    """The first twelve test images as 0.png … 11.png, half of them in a folder below."""
    root = tmp_path_factory.mktemp("images")
    (root / "more").mkdir()
    for number, image in enumerate(test_images[:12]):
        Image.fromarray(image).save(root / ("more" if number % 2 else ".") / f"{number}.png")
    return root
