"""What a source returns: images with multi-hot labels, split into training, validation and test."""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.config import options
from fednca.data.fetch import Progress
from fednca.data.store import StoredImages


@dataclass(frozen=True)
class FileImages:
    """Images that are still files of any size and format; `fednca.data.store` decodes them once."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        """Count the images."""
        return len(self.paths)


@dataclass(frozen=True, eq=False)
class Split:
    """Images with their labels, row by row.

    images: pixels (N, H, W, 3), in memory or in a store, or files; labels: (N, C), 1 present, 0 absent, -1 unknown;
    groups: (N,), images of one group, such as a patient, stay together; sites: (N,), an index into the dataset's
    `sites`.
    """

    images: NDArray[np.uint8] | FileImages | StoredImages
    labels: NDArray[np.int8]
    groups: NDArray[np.int64] | None = None
    sites: NDArray[np.int64] | None = None
    unreadable: tuple[tuple[int, str, str], ...] = ()  # row in the source, path and problem of each image left out
    listed_in: Path | None = None  # the file that lists them, if there are any

    def __post_init__(self) -> None:
        """Refuse arrays that do not describe the same N images."""
        array = self.images
        for name in ("labels", "groups", "sites"):
            given = getattr(self, name)
            if not isinstance(given, np.ndarray) and (given is not None or name == "labels"):
                raise FedncaError(f"{name} are a {type(given).__name__}; give a NumPy array")
        if isinstance(array, np.ndarray) and (array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3):
            raise FedncaError(f"images are {_describe(array)}; give uint8 of shape (N, H, W, 3)")
        if self.labels.dtype != np.int8 or self.labels.ndim != 2 or len(self.labels) != len(self):
            raise FedncaError(f"labels are {_describe(self.labels)}; give int8 of shape ({len(self)}, classes)")
        if not ((self.labels >= -1) & (self.labels <= 1)).all():
            low, high = self.labels.min(), self.labels.max()
            raise FedncaError(f"labels run from {low} to {high}; give 1 for present, 0 for absent, -1 for unknown")
        for name, numbers in (("groups", self.groups), ("sites", self.sites)):
            if numbers is not None and (numbers.dtype != np.int64 or numbers.shape != (len(self),)):
                raise FedncaError(f"{name} are {_describe(numbers)}; give int64 of shape ({len(self)},)")

    def __len__(self) -> int:
        """Count the images."""
        return len(self.images)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named set of splits with the same classes; without `val`, a federation holds out a part of `train`."""

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split | None
    test: Split
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse two classes of one name, and splits that do not have one label column per class."""
        if twice := [name for name in self.classes if self.classes.count(name) > 1]:
            raise FedncaError(f"{self.name} has two classes of the name '{twice[0]}'; rename one")
        for part, split in (("train", self.train), ("val", self.val), ("test", self.test)):
            if not isinstance(split, (Split, NoneType) if part == "val" else Split):
                raise FedncaError(f"{self.name} {part} is a {type(split).__name__}; give a fednca.data.Split")
            if split is not None and split.labels.shape[1] != len(self.classes):
                have, want = split.labels.shape[1], len(self.classes)
                raise FedncaError(f"{self.name} {part} has {have} label columns for {want} classes; give one per class")

    def splits(self) -> list[Split]:
        """Return the splits that exist."""
        return [split for split in (self.train, self.val, self.test) if split is not None]


class Source(Protocol):
    """A dataset: a module in `fednca.data.sources`, or a module or an object of one's own."""

    Options: type[options.Options]
    SUMMARY: str
    SIZE: str
    LICENCE: str
    OBTAINED: str
    CLASSES: tuple[str, ...]

    def missing(self, root: Path) -> list[str]:
        """Return the name of each file that is missing below `root`; none if the dataset can be loaded."""
        ...

    def prepare(self, root: Path, progress: Progress) -> None:
        """Download what may be downloaded, or raise an error that says what to fetch by hand and where to put it."""
        ...

    def load(self, options: options.Options, root: Path | None) -> Dataset:
        """Read the dataset; `options` is an instance of the module's own Options, `root` the folder of its files."""
        ...


def _describe(array: NDArray[np.generic]) -> str:
    return f"{array.dtype} of shape {array.shape}"
