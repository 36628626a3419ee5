"""Composites of the 8x8 handwritten digits in scikit-learn: a dataset that needs no download."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednca.base.randomness import numpy_rng
from fednca.config.options import Options as BaseOptions
from fednca.data.compose import composed
from fednca.data.fetch import Progress
from fednca.data.types import Dataset

SUMMARY = "one or two handwritten digits on a 16x16 canvas, 10 classes, bundled with scikit-learn"
SIZE = "2,000 train / 400 val / 800 test composites"
LICENCE = "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)"
OBTAINED = "part of scikit-learn"
CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

TRAIN_SHARE, VAL_SHARE = 0.65, 0.13  # of each digit's 174 to 183 images; the rest are for test


class Options(BaseOptions):
    """How many composites each split holds."""

    seed: int = 0
    """Seed that shares out the source images between the splits and draws every composite."""
    train_singles: int = Field(default=110, ge=0)
    """Number of training images with one digit, per class."""
    train_pairs: int = Field(default=20, ge=0)
    """Number of training images with two different digits, per pair of classes."""
    val_singles: int = Field(default=22, ge=0)
    """Number of validation images with one digit, per class."""
    val_pairs: int = Field(default=4, ge=0)
    """Number of validation images with two different digits, per pair of classes."""
    test_singles: int = Field(default=35, ge=0)
    """Number of test images with one digit, per class."""
    test_pairs: int = Field(default=10, ge=0)
    """Number of test images with two different digits, per pair of classes."""


def missing(root: Path) -> list[str]:
    """Return nothing: the digits come with scikit-learn."""
    return []


def prepare(root: Path, progress: Progress) -> None:
    """Do nothing: the digits come with scikit-learn."""


def load(options: Options, root: Path | None) -> Dataset:
    """Compose the three splits from disjoint source images; `root` is not used."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    rows = split_rows(digits.target, options.seed)
    sources = {part: (images[own], digits.target[own]) for part, own in rows.items()}
    return composed("digits", CLASSES, sources, options)


def split_rows(target: NDArray[np.integer], seed: int) -> dict[str, NDArray[np.intp]]:
    """Share out the source images of every class, so that no image is in two splits.

    target: (N,), the class of each source image; returns the rows for train, val and test.
    """
    rng = numpy_rng(seed, "digits split")
    parts: dict[str, list[NDArray[np.intp]]] = {"train": [], "val": [], "test": []}
    for digit in range(len(CLASSES)):
        members = rng.permutation(np.flatnonzero(target == digit))
        val_from = int(TRAIN_SHARE * len(members))
        test_from = val_from + int(VAL_SHARE * len(members))
        for part, chosen in zip(parts, np.split(members, [val_from, test_from]), strict=True):
            parts[part].append(chosen)
    return {part: np.concatenate(chosen) for part, chosen in parts.items()}
