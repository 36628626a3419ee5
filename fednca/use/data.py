"""The dataset of a run, as far as its use needs it: labels, and a few images."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.data.examples import choose_rows, picture_of
from fednca.data.load import load_dataset, read_dataset
from fednca.data.types import Dataset
from fednca.runs import Run


class Example(NamedTuple):
    """A test image and what it shows."""

    picture: NDArray[np.uint8]
    """(H, W, 3)"""
    labels: tuple[str, ...]


def dataset_of(run: Run) -> Dataset:
    """Load a run's dataset with its images as they are, since decoding all of them for a few would take long."""
    config = run.placed
    if run.environment.get("unreadable"):  # which images were left out is known only after decoding
        return load_dataset(config)
    return read_dataset(config)


def examples(run: Run, most: int = 8) -> list[Example]:
    """Return test images that together show many classes; none where the dataset is not at hand."""
    try:
        dataset = dataset_of(run)
        test = dataset.test
        return [
            Example(picture_of(test, row), tuple(np.array(dataset.classes)[test.labels[row] == 1].tolist()))
            for row in choose_rows(test.labels == 1, most)
        ]
    except FedncaError:
        return []
