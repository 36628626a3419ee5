"""DermaMNIST composites: one or two skin lesions on a black canvas."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednca.base.arrays import read_arrays
from fednca.base.errors import FedncaError
from fednca.base.packages import needed
from fednca.config.options import Options as BaseOptions
from fednca.data.compose import Sources, composed
from fednca.data.fetch import Progress, download
from fednca.data.layout import require
from fednca.data.types import Dataset

SUMMARY = "one or two skin lesions of DermaMNIST on a 56x56 canvas, 7 classes"
SIZE = "8,057 train / 1,213 val / 2,425 test composites"
LICENCE = "CC BY-NC 4.0"
OBTAINED = "downloaded with the optional package medmnist: dermamnist.npz, 20 MB"
CLASSES = (
    "actinic keratoses", "basal cell carcinoma", "benign keratosis-like lesions", "dermatofibroma", "melanoma",
    "melanocytic nevi", "vascular lesions",
)  # fmt: skip

FILE = "dermamnist.npz"


class Options(BaseOptions):
    """How many composites of two images each split holds; every source image is also used alone, once."""

    seed: int = 0
    """Seed that draws every composite."""
    train_pairs: int = Field(default=50, ge=0)
    """Number of training composites of two images, per pair of classes."""
    val_pairs: int = Field(default=10, ge=0)
    """Number of validation composites of two images, per pair of classes."""
    test_pairs: int = Field(default=20, ge=0)
    """Number of test composites of two images, per pair of classes."""


def missing(root: Path) -> list[str]:
    """Return the file if it is missing."""
    return [] if (root / FILE).is_file() else [f"'{root / FILE}' (MedMNIST's file of 28-pixel images)"]


def prepare(root: Path, progress: Progress) -> None:
    """Download the file from the address in the package medmnist."""
    if not missing(root):
        return
    instead = f", or put MedMNIST's {FILE} at '{root / FILE}' by hand"
    facts = needed("medmnist.info", "dermamnist", "downloading dermamnist", instead).INFO["dermamnist"]
    download(facts["url"], root / FILE, checksum=f"md5:{facts['MD5']}", progress=progress)


def load(options: Options, root: Path | None) -> Dataset:
    """Compose the three splits, each from its official source images."""
    path = require("dermamnist", root, missing) / FILE
    arrays = read_arrays(path, "download it again")
    sources = {part: _source(arrays, part, path) for part in ("train", "val", "test")}
    return composed("dermamnist", CLASSES, sources, options)


def _source(arrays: dict[str, NDArray[np.generic]], part: str, path: Path) -> Sources:
    """Return a split's source images (N, 28, 28, 3) and their classes (N,)."""
    for name in (f"{part}_images", f"{part}_labels"):
        if name not in arrays:
            raise FedncaError(f"'{path}' has no array '{name}'; replace it with MedMNIST's {FILE}")
    images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or len(images) != len(labels):
        shape = f"{images.dtype} {images.shape} for {len(labels)} labels"
        raise FedncaError(f"{part}_images of '{path}' are {shape}; replace the file with MedMNIST's {FILE}")
    wrong = np.flatnonzero(~np.isin(labels, np.arange(len(CLASSES))))
    if len(wrong):
        row = wrong[0]
        raise FedncaError(
            f"{part}_labels of '{path}' has {labels[row]} in row {row}, but classes are 0 to 6; "
            f"replace the file with MedMNIST's {FILE}"
        )
    return images.astype(np.uint8, copy=False), labels.astype(np.intp)
