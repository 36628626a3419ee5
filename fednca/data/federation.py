"""A dataset dealt to clients: what the engines train on, select on and test on."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fednca.data.partition import (
    Partition,
    Unmatched,
    deal,
    dirichlet_presence,
    from_arrays,
    read_arrays,
    to_arrays,
    write_arrays,
)
from fednca.data.types import Dataset, Split
from fednca.errors import FedncaError
from fednca.randomness import numpy_rng


@dataclass(frozen=True, eq=False)
class Share:
    """The rows of an image store that serve one purpose, and which client holds which of them.

    rows: (n,), rows of `split`, those the partition leaves out too; partition: of `split.labels[rows]`.
    """

    split: Split
    rows: NDArray[np.intp]
    partition: Partition

    def client(self, k: int) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Return client k's rows of `split`, (n_k,), and their labels as k sees them, (n_k, C)."""
        own = self.partition.clients[k]
        return self.rows[own], self.partition.client_labels(self.split.labels[self.rows], k)

    def union(self) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Return the rows and labels of all clients, one after the other."""
        rows, labels = zip(*map(self.client, range(len(self.partition.clients))), strict=True)
        return np.concatenate(rows), np.concatenate(labels)

    def everything(self) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Return all rows, those no client holds too, with their labels as the source gives them."""
        return self.rows, self.split.labels[self.rows]


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset, its training images dealt to clients, and its validation images dealt by the same classes and shares.

    Centralised training uses `train.everything()`; the test split, `dataset.test`, is nobody's.
    """

    dataset: Dataset
    train: Share
    val: Share

    def save(self, path: Path) -> None:
        """Write who holds what, without the images, as an npz file."""
        arrays: dict[str, NDArray[np.generic]] = {"fingerprint": np.array(fingerprint(self.dataset))}
        for part, share in (("train", self.train), ("val", self.val)):
            arrays[f"{part}/rows"] = share.rows
            arrays |= {f"{part}/{name}": array for name, array in to_arrays(share.partition).items()}
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path, dataset: Dataset) -> Self:
        """Rebuild the federation that `save` wrote over this dataset."""
        arrays = read_arrays(path, "fingerprint")
        if str(arrays["fingerprint"]) != fingerprint(dataset):
            raise FedncaError(f"'{path}' deals out other labels than those of {dataset.name}; load the data it was for")

        def share(part: str, split: Split) -> Share:
            own = {
                name.removeprefix(f"{part}/"): array for name, array in arrays.items() if name.startswith(f"{part}/")
            }
            return Share(split, own["rows"].astype(np.intp), from_arrays(own))

        return cls(dataset, share("train", dataset.train), share("val", _val_split(dataset)))


def build_federation(
    dataset: Dataset,
    *,
    clients: int,
    beta: float,
    gamma: float,
    seed: int,
    unmatched: Unmatched = "drop",
    min_samples: int = 32,
    val_fraction: float = 0.1,
) -> Federation:
    """Deal a dataset to clients; without a validation split, `val_fraction` of the training images becomes one."""
    train, val = dataset.train, _val_split(dataset)
    if dataset.val is None:
        train_rows, val_rows = hold_out(train, val_fraction, seed)
    else:
        train_rows, val_rows = np.arange(len(train)), np.arange(len(val))
    dealt = dirichlet_presence(
        train.labels[train_rows],
        clients,
        beta,
        gamma,
        seed,
        groups=_groups(train, train_rows),
        unmatched=unmatched,
        min_samples=min_samples,
    )
    dealt_val = deal(
        val.labels[val_rows],
        dealt.classes,
        dealt.proportions,
        numpy_rng(seed, "deal validation"),
        groups=_groups(val, val_rows),
        unmatched=unmatched,
    )
    return Federation(dataset, Share(train, train_rows, dealt), Share(val, val_rows, dealt_val))


def hold_out(split: Split, fraction: float, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Set about `fraction` of a split aside at random, never part of a group: (rows that stay, rows set aside)."""
    if not 0 < fraction < 1:
        raise FedncaError(f"val_fraction is {fraction}; give a number between 0 and 1")
    groups = np.arange(len(split)) if split.groups is None else split.groups
    _, unit, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = numpy_rng(seed, "hold out validation").permutation(len(sizes))
    within = np.count_nonzero(sizes[order].cumsum() <= round(fraction * len(split)))
    aside = np.isin(unit, order[: max(1, within)])
    return np.flatnonzero(~aside), np.flatnonzero(aside)


def fingerprint(dataset: Dataset) -> str:
    """Digest what a federation is built from: the classes, and the labels and groups of train and val."""
    digest = blake2b(repr(dataset.classes).encode(), digest_size=16)
    for split in (dataset.train, dataset.val):
        for array in () if split is None else (split.labels, split.groups):
            digest.update(b"none" if array is None else f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def resize(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Squash images to a square, bilinear with antialiasing: (N, H, W, 3) → (N, size, size, 3)."""
    if images.shape[1:3] == (size, size):
        return images
    import torch
    from torch.nn.functional import interpolate

    resized = np.empty((len(images), size, size, images.shape[3]), np.uint8)
    for start in range(0, len(images), 256):  # a batch at a time, so that a memory map stays one
        batch = torch.from_numpy(images[start : start + 256]).permute(0, 3, 1, 2)
        small = interpolate(batch, (size, size), mode="bilinear", antialias=True)
        resized[start : start + 256] = small.permute(0, 2, 3, 1).numpy()
    return resized


def _val_split(dataset: Dataset) -> Split:
    return dataset.train if dataset.val is None else dataset.val


def _groups(split: Split, rows: NDArray[np.intp]) -> NDArray[np.int64] | None:
    return None if split.groups is None else split.groups[rows]
