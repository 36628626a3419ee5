"""A dataset dealt to clients: what each of them trains on, and what models are validated and tested on."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Self, get_args

import numpy as np
from numpy.typing import NDArray

from fednca.base.arrays import read_arrays, write_arrays
from fednca.base.errors import FedncaError, unknown_name
from fednca.base.randomness import numpy_rng
from fednca.data.partition import Kind, Partition, Unmatched, deal, dirichlet_presence, natural_sites
from fednca.data.types import Dataset, Split

WAY_OUT = "give a file that save() wrote"


@dataclass(frozen=True, eq=False)
class Share:
    """The images for one purpose, training or validation, and which client holds which of them.

    rows: (n,), rows of `split`, including those that no client holds; partition: who holds which entry of `rows`.
    """

    split: Split
    rows: NDArray[np.intp]
    partition: Partition

    def client(self, k: int) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Return client k's rows of `split`, (n_k,), and their labels as k sees them, (n_k, C)."""
        own = self.partition.clients[k]
        return self.rows[own], self.partition.client_labels(self.split.labels[self.rows], k)

    def union(self) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Return the rows and labels of all clients, one client after the other."""
        rows, labels = zip(*map(self.client, range(len(self.partition.clients))), strict=True)
        return np.concatenate(rows), np.concatenate(labels)

    def everything(self) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Return all rows, including those that no client holds, with their labels as the source gives them."""
        return self.rows, self.split.labels[self.rows]


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset with its training and validation images dealt to clients.

    Both are dealt by the same classes and shares, or stay at their sites. Centralised training uses
    `train.everything()`. No client holds the test split, `dataset.test`.
    """

    dataset: Dataset
    train: Share
    val: Share

    def save(self, path: Path) -> None:
        """Write who holds which image, without the images, as an npz file."""
        arrays: dict[str, NDArray[np.generic]] = {
            "fingerprint": np.array(fingerprint(self.dataset, self.dataset.train, self.dataset.val)),
            "test/fingerprint": np.array(fingerprint(self.dataset, self.dataset.test)),
        }
        for part, share in (("train", self.train), ("val", self.val)):
            arrays[f"{part}/rows"] = share.rows
            arrays |= {f"{part}/{name}": array for name, array in share.partition.to_arrays().items()}
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path, dataset: Dataset) -> Self:
        """Rebuild the federation that `save` wrote for this dataset."""
        arrays = read_arrays(path, WAY_OUT)
        if "fingerprint" not in arrays:
            raise FedncaError(f"'{path}' has no array 'fingerprint'; {WAY_OUT}")
        known = fingerprint(dataset, dataset.test)
        same_test = str(arrays.get("test/fingerprint", known)) == known  # older runs lack it
        if str(arrays["fingerprint"]) != fingerprint(dataset, dataset.train, dataset.val) or not same_test:
            raise FedncaError(
                f"'{path}' was made for other labels than those of {dataset.name}; load the data that it was made for"
            )

        def share(part: str, split: Split) -> Share:
            own = {
                name.removeprefix(f"{part}/"): array for name, array in arrays.items() if name.startswith(f"{part}/")
            }
            if not own.keys() >= {"rows", "owner", "reasons", "classes", "proportions", "unmatched"}:
                raise FedncaError(f"'{path}' is damaged: it lacks arrays of the {part} images; start the run again")
            rows = own["rows"].astype(np.intp)
            if len(rows) != len(own["owner"]) or rows.min(initial=0) < 0 or rows.max(initial=0) >= len(split):
                raise FedncaError(f"'{path}' is damaged: its rows do not fit the {part} images; start the run again")
            return Share(split, rows, Partition.from_arrays(own))

        return cls(dataset, share("train", dataset.train), share("val", _val_split(dataset)))


def build_federation(
    dataset: Dataset,
    *,
    kind: Kind = "dirichlet",
    clients: int,
    beta: float,
    gamma: float,
    seed: int,
    unmatched: Unmatched = "drop",
    min_samples: int = 32,
    val_fraction: float = 0.1,
) -> Federation:
    """Deal a dataset to clients; without a validation split, `val_fraction` of the training images becomes one.

    kind "dirichlet": `clients` clients at random. Each holds the share `gamma` of all classes; `beta` is the Dirichlet
    concentration of the shares in which images go to clients: the smaller, the more uneven.
    kind "natural": every site of the dataset is a client, and `clients`, `beta`, `gamma` and `unmatched` are ignored.
    """
    if kind not in get_args(Kind):
        raise unknown_name("partition kind", kind, get_args(Kind))
    train, val = dataset.train, _val_split(dataset)
    if dataset.val is None:
        train_rows, val_rows = hold_out(train, val_fraction, seed, by_site=kind == "natural")
    else:
        train_rows, val_rows = np.arange(len(train)), np.arange(len(val))
    if kind == "natural":
        dealt = _leave_at_sites(dataset, train, train_rows)
        _check_sites(dataset.sites, dealt, min_samples)
    else:
        labels, groups = train.labels[train_rows], _groups(train, train_rows)
        dealt = dirichlet_presence(
            labels, clients, beta, gamma, seed, groups=groups, unmatched=unmatched, min_samples=min_samples
        )
    return Federation(dataset, Share(train, train_rows, dealt), _validation(dataset, val_rows, dealt, kind, seed))


def hold_out(
    split: Split, fraction: float, seed: int, *, by_site: bool = False, purpose: str = "hold out validation"
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Set aside about `fraction` of a split at random, in whole groups; return (rows that stay, rows set aside).

    With `by_site`, set aside about that share of each site, and at least one group. A group belongs to the site of its
    first image. A site with a single group keeps it.
    """
    if not 0 < fraction < 1:
        raise FedncaError(f"val_fraction is {fraction}; give a number between 0 and 1")
    groups = np.arange(len(split)) if split.groups is None else split.groups
    _, first, unit, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    order = numpy_rng(seed, purpose).permutation(len(sizes))
    home = split.sites[first] if by_site and split.sites is not None else np.zeros(len(sizes), np.int64)
    aside = np.zeros(len(sizes), np.bool_)
    for site in np.unique(home):
        own = order[home[order] == site]
        within = np.count_nonzero(sizes[own].cumsum() <= round(fraction * sizes[own].sum()))
        aside[own[: min(max(1, within), len(own) - 1)]] = True  # keep one for training
    return np.flatnonzero(~aside[unit]), np.flatnonzero(aside[unit])


def without_validation(federation: Federation) -> list[str]:
    """Return the names of the sites that have no validation images, for a natural partition."""
    clients = federation.val.partition.clients
    return [name for name, rows in zip(federation.dataset.sites, clients, strict=True) if not len(rows)]


def fingerprint(dataset: Dataset, *splits: Split | None) -> str:
    """Return a digest of what a federation is built from: the classes, and the splits' labels, groups and sites."""
    digest = blake2b(repr(dataset.classes).encode(), digest_size=16)
    for split in splits:
        for array in () if split is None else (split.labels, split.groups):
            digest.update(b"none" if array is None else f"{array.shape}".encode() + array.tobytes())
        # Data without sites keeps the fingerprint that older runs have written.
        if split is not None and split.sites is not None:
            digest.update(repr(dataset.sites).encode() + split.sites.tobytes())
    return digest.hexdigest()


def _val_split(dataset: Dataset) -> Split:
    return dataset.train if dataset.val is None else dataset.val


def _groups(split: Split, rows: NDArray[np.intp]) -> NDArray[np.int64] | None:
    return None if split.groups is None else split.groups[rows]


def _validation(dataset: Dataset, rows: NDArray[np.intp], train: Partition, kind: Kind, seed: int) -> Share:
    """Leave validation images at their sites if these are known; else deal them like the training images."""
    split = _val_split(dataset)
    if kind == "natural" and split.sites is not None:
        own = _leave_at_sites(dataset, split, rows)
        return Share(split, rows, replace(own, classes=train.classes, proportions=train.proportions))
    labels, groups, rng = split.labels[rows], _groups(split, rows), numpy_rng(seed, "deal validation")
    dealt = deal(labels, train.classes, train.proportions, rng, groups=groups, unmatched=train.unmatched)
    return Share(split, rows, dealt)


def _leave_at_sites(dataset: Dataset, split: Split, rows: NDArray[np.intp]) -> Partition:
    if split.sites is None or not dataset.sites:
        raise FedncaError(
            f"{dataset.name} does not say which site an image comes from, so it has no natural partition; "
            "name the table's column of sites (site_column), or use kind 'dirichlet'"
        )
    return natural_sites(split.labels[rows], split.sites[rows], len(dataset.sites))


def _check_sites(names: tuple[str, ...], partition: Partition, min_samples: int) -> None:
    for name, rows in zip(names, partition.clients, strict=True):
        if len(rows) < min_samples:
            if not len(rows):
                why = "all are unreadable, for validation or test, or in groups that belong to another site"
                raise FedncaError(
                    f"site '{name}' has no training images ({why}); "
                    "set the split of some to 'train', or leave the site out of the data"
                )
            raise FedncaError(
                f"site '{name}' has {len(rows)} training images, but min_samples is {min_samples}; "
                "lower min_samples, or leave the site out of the data"
            )
