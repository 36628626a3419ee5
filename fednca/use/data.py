"""The dataset of a run, as a trained model needs it: labels and a few images."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.data.examples import choose_rows, picture_of
from fednca.data.load import load_dataset, read_dataset
from fednca.data.types import Dataset
from fednca.runs import Run


class Example(NamedTuple):
    """A test image and the classes it shows."""

    picture: NDArray[np.uint8]
    """(H, W, 3)"""
    labels: tuple[str, ...]


def dataset_of(run: Run) -> Dataset:
    """Load a run's dataset without decoding its images, which would take long when only a few are needed."""
    config = run.placed
    if run.environment.get("unreadable"):  # only decoding shows which images are left out
        return load_dataset(config)
    return read_dataset(config)


def examples(run: Run, most: int = 8) -> list[Example]:
    """Return test images that together show many classes; none if the dataset is not there."""
    try:
        dataset = dataset_of(run)
        test = dataset.test
        return [
            Example(picture_of(test, row), tuple(np.array(dataset.classes)[test.labels[row] == 1].tolist()))
            for row in choose_rows(test.labels == 1, most)
        ]
    except FedncaError:
        return []
