"""Decode image files to a model's size on all cores, and keep those that cannot be read apart."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednca.base.errors import FedncaError
from fednca.data.images import DICOM_SUFFIXES, FORMATS, ImageError, read_resized
from fednca.data.processes import cores, processes
from fednca.data.store import FEW


class Batch(NamedTuple):
    """The images of a batch that could be read, and the errors of the others."""

    rows: list[int]
    """numbers of the images that were read, counted over all batches"""
    pixels: NDArray[np.uint8]
    """(n, size, size, 3)"""
    failed: dict[int, ImageError]
    """by the number of the image"""


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """Return the named files and, below the named folders, all files with an image's ending."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if place.is_dir():
            endings = image_endings()
            inside = sorted(path for path in place.rglob("*") if path.suffix.lower() in endings and path.is_file())
            if not inside:
                raise FedncaError(f"folder '{place}' has no images; their names end in {', '.join(sorted(endings))}")
            found |= dict.fromkeys(inside)
        else:
            found[place] = None
    return list(found)


def image_endings() -> set[str]:
    """Return the endings of image files, in lower case."""
    usual = (ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS)
    return {*usual, *DICOM_SUFFIXES}


def read_batches(paths: Sequence[Path], size: int, batch: int) -> Iterator[Batch]:
    """Decode and squash files as in training, in their order."""
    starts = range(0, len(paths), batch)
    with processes(1 if len(paths) < FEW else cores()) as run:
        yield from run(partial(_read_batch, size), starts, [paths[start : start + batch] for start in starts])


def _read_batch(size: int, start: int, paths: Sequence[Path]) -> Batch:
    images: dict[int, NDArray[np.uint8]] = {}
    failed: dict[int, ImageError] = {}
    for row, path in enumerate(paths, start):
        try:
            images[row] = read_resized(path, size)
        except ImageError as error:
            failed[row] = error
    pixels = np.stack(list(images.values())) if images else np.empty((0, size, size, 3), np.uint8)
    return Batch(list(images), pixels, failed)
