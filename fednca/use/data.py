"""The dataset of a run, as a trained model needs it: labels and a few images."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednca.data.images import read_image
from fednca.data.store import StoredImages
from fednca.data.types import Dataset, FileImages, Split
from fednca.errors import FedncaError
from fednca.runs import Run
from fednca.setup import load_dataset, read_dataset


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


def choose_rows(shows: NDArray[np.bool_], most: int) -> list[int]:
    """Choose rows of (N, C) one by one: each time the first that adds most to the classes shown least so far.

    >>> choose_rows(np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool), 2)
    [1, 2]
    """
    times_shown, chosen = np.zeros(shows.shape[1]), list[int]()
    for _ in range(min(most, len(shows))):
        gain = (shows / (1 + times_shown) ** 2).sum(axis=1)
        gain[chosen] = -1
        chosen.append(int(gain.argmax()))
        times_shown += shows[chosen[-1]]
    return chosen


def picture_of(split: Split, row: int) -> NDArray[np.uint8]:
    """Return one image (H, W, 3)."""
    images = split.images
    if isinstance(images, FileImages):
        return read_image(images.paths[row])
    picture: NDArray[np.uint8] = images.take(np.array([row]))[0] if isinstance(images, StoredImages) else images[row]
    return picture
