"""CIFAR-10 composites: one or two photographs on a black canvas."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednca.base.errors import FedncaError
from fednca.base.randomness import numpy_rng
from fednca.config.options import Options as BaseOptions
from fednca.data.compose import composed
from fednca.data.fetch import Archive, Progress, obtain
from fednca.data.layout import require
from fednca.data.types import Dataset

SUMMARY = "one or two CIFAR-10 images on a 64x64 canvas, 10 classes"
SIZE = "40,000 train / 4,000 val / 10,250 test composites"
LICENCE = "none stated; cite Krizhevsky (2009)"
OBTAINED = "downloaded: cifar-10-binary.tar.gz, 170 MB"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

ARCHIVE = Archive(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-batches-bin",
)
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)

SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # bytes: the class, then a plane each of red, green and blue
VAL_SHARE = 0.1  # of each class's training images


class Options(BaseOptions):
    """How many composites each split holds."""

    seed: int = 0
    """Seed that picks the validation images and draws every composite."""
    train_singles: int = Field(default=3100, ge=0)
    """Number of training composites of one image, per class."""
    train_pairs: int = Field(default=200, ge=0)
    """Number of training composites of two images, per pair of classes."""
    val_singles: int = Field(default=310, ge=0)
    """Number of validation composites of one image, per class."""
    val_pairs: int = Field(default=20, ge=0)
    """Number of validation composites of two images, per pair of classes."""
    test_singles: int = Field(default=800, ge=0)
    """Number of test composites of one image, per class."""
    test_pairs: int = Field(default=50, ge=0)
    """Number of test composites of two images, per pair of classes."""


def missing(root: Path) -> list[str]:
    """Return the missing files of the binary version."""
    folder = _folder(root)
    pickled = (root / "cifar-10-batches-py").exists()
    why = "; the pickled cifar-10-batches-py is never read" if pickled else ""
    absent = [name for name in (*TRAIN_FILES, *TEST_FILES) if not (folder / name).is_file()]
    return [f"'{folder / name}' (of {ARCHIVE.name}{why})" for name in absent]


def prepare(root: Path, progress: Progress) -> None:
    """Download the binary version."""
    if missing(root):
        obtain(ARCHIVE, root, progress)
    require("cifar10", root, missing)


def load(options: Options, root: Path | None) -> Dataset:
    """Compose the three splits from disjoint source images."""
    folder = _folder(require("cifar10", root, missing))
    images, labels = read_batches(folder, TRAIN_FILES)
    kept, aside = set_aside(labels, options.seed)
    sources = {part: (images[rows], labels[rows]) for part, rows in (("train", kept), ("val", aside))}
    return composed("cifar10", CLASSES, {**sources, "test": read_batches(folder, TEST_FILES)}, options)


def read_batches(folder: Path, names: tuple[str, ...]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read and join files of the binary version: images (N, 32, 32, 3), labels (N,)."""
    records = np.concatenate([_records(folder / name) for name in names])
    planes = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), records[:, 0]


def set_aside(labels: NDArray[np.uint8], seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Draw a tenth of every class's training images for validation; return (rows that stay, rows set aside)."""
    rng = numpy_rng(seed, "cifar10 validation")
    aside = np.zeros(len(labels), np.bool_)
    for c in range(len(CLASSES)):
        members = np.flatnonzero(labels == c)
        aside[rng.permutation(members)[: round(VAL_SHARE * len(members))]] = True
    return np.flatnonzero(~aside), np.flatnonzero(aside)


def _folder(root: Path) -> Path:
    directly = any((root / name).exists() for name in (*TRAIN_FILES, *TEST_FILES))
    return root if directly else root / ARCHIVE.folder


def _records(path: Path) -> NDArray[np.uint8]:
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % RECORD:
        raise FedncaError(f"'{path}' has {len(content)} bytes, not a multiple of {RECORD}; unpack {ARCHIVE.name} again")
    records = content.reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] >= len(CLASSES))
    if len(wrong):
        row = wrong[0]
        raise FedncaError(f"'{path}' record {row} has class {records[row, 0]}, not 0 to 9; unpack {ARCHIVE.name} again")
    return records
