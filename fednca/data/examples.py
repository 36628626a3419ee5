"""A few images that show what is in a dataset."""

import numpy as np
from numpy.typing import NDArray

from fednca.data.images import read_image
from fednca.data.store import StoredImages
from fednca.data.types import FileImages, Split


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
