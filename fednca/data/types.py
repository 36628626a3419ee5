"""What a source hands over: images and multi-hot labels, split for training, validation and test."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.config import options
from fednca.data.fetch import Progress
from fednca.data.store import StoredImages


@dataclass(frozen=True)
class FileImages:
    """Images that are still files, in any size and format; `fednca.data.store` decodes them once."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        """Count the images."""
        return len(self.paths)


@dataclass(frozen=True, eq=False)
class Split:
    """Images with their labels, row by row.

    images: pixels (N, H, W, 3), in memory or stored, or files; labels: (N, C), 1 present, 0 absent, -1 unknown;
    groups: (N,), e.g. the patient; sites: (N,), an index into the dataset's `sites`.
    """

    images: NDArray[np.uint8] | FileImages | StoredImages
    labels: NDArray[np.int8]
    groups: NDArray[np.int64] | None = None
    sites: NDArray[np.int64] | None = None
    unreadable: tuple[tuple[int, str, str], ...] = ()  # row of the source, path, reason of each image left out
    listed_in: Path | None = None  # the file that lists them, where there are any

    def __post_init__(self) -> None:
        """Refuse arrays that do not describe the same N images."""
        array = self.images
        if isinstance(array, np.ndarray) and (array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3):
            raise FedncaError(f"images are {_describe(array)}; give uint8 of shape (N, H, W, 3)")
        if self.labels.dtype != np.int8 or self.labels.ndim != 2 or len(self.labels) != len(self):
            raise FedncaError(f"labels are {_describe(self.labels)}; give int8 of shape ({len(self)}, classes)")
        if not ((self.labels >= -1) & (self.labels <= 1)).all():
            low, high = self.labels.min(), self.labels.max()
            raise FedncaError(f"labels run from {low} to {high}; give 1 present, 0 absent, -1 unknown")
        for name, numbers in (("groups", self.groups), ("sites", self.sites)):
            if numbers is not None and (numbers.dtype != np.int64 or numbers.shape != (len(self),)):
                raise FedncaError(f"{name} are {_describe(numbers)}; give int64 of shape ({len(self)},)")

    def __len__(self) -> int:
        """Count the images."""
        return len(self.images)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named set of splits that share their classes; without `val`, a federation takes it from `train`."""

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split | None
    test: Split
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse splits whose label columns are not the classes."""
        for part, split in (("train", self.train), ("val", self.val), ("test", self.test)):
            if split is not None and split.labels.shape[1] != len(self.classes):
                have, want = split.labels.shape[1], len(self.classes)
                raise FedncaError(f"{self.name} {part} has {have} label columns for {want} classes; give one per class")

    def splits(self) -> list[Split]:
        """Return the splits there are."""
        return [split for split in (self.train, self.val, self.test) if split is not None]


class Source(Protocol):
    """A module in `fednca.data.sources`; its name is the module's, with '-' for '_'."""

    Options: type[options.Options]
    SUMMARY: str
    SIZE: str
    LICENCE: str
    OBTAINED: str
    CLASSES: tuple[str, ...]

    def missing(self, root: Path) -> list[str]:
        """Name each file that is not where it belongs below `root`; nothing when the dataset can be loaded."""
        ...

    def prepare(self, root: Path, progress: Progress) -> None:
        """Download what may be downloaded, or say what must be fetched by hand and where it goes."""
        ...

    def load(self, options: options.Options, root: Path | None) -> Dataset:
        """Read the dataset; `options` is an instance of the module's own Options, `root` the folder of its files."""
        ...


def _describe(array: NDArray[np.generic]) -> str:
    return f"{array.dtype} of shape {array.shape}"
