"""What a partition did, as facts: who holds what, what was left out, how far the clients are apart."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednca.data.distances import cooccurrence_distance, label_distance, missing_classes
from fednca.data.federation import Federation
from fednca.data.partition import summary


def partition_report(federation: Federation, settings: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Describe a federation in plain JSON; an undefined distance is None.

    settings: what the caller asked for; where the federation knows better, its own values replace them.
    """
    dataset, train, val = federation.dataset, federation.train, federation.val
    partition = train.partition
    counts = train_counts(federation)
    seen = [train.client(k)[1] for k in range(len(counts))]
    unreadable = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    return {
        "dataset": dataset.name,
        "classes": list(dataset.classes),
        "settings": {**(settings or {}), "clients": len(counts), "unmatched": partition.unmatched},
        "images": {"train": len(train.rows), "val": len(val.rows), "test": len(dataset.test)},
        "clients": [_client(federation, k, counts[k]) for k in range(len(counts))],
        "left_out": {reason: len(rows) for reason, rows in partition.left_out.items()},
        "val_left_out": {reason: len(rows) for reason, rows in val.partition.left_out.items()},
        "unreadable": {part: 0 if split is None else len(split.unreadable) for part, split in unreadable.items()},
        "positives": {
            "train": _by_class(federation, positives(train.everything()[1])),
            "test": _by_class(federation, positives(dataset.test.labels)),
        },
        "all_zero": {
            "train": _number(all_zero_share(train.everything()[1])),
            "test": _number(all_zero_share(dataset.test.labels)),
        },
        "label_distance": _number(label_distance(counts)),
        "cooccurrence_distance": _number(cooccurrence_distance(seen)),
        "missing_classes": missing_classes(counts),
    }


def train_counts(federation: Federation) -> NDArray[np.intp]:
    """Count each client's training images of each class, by the labels the client sees: (K, C)."""
    share = federation.train
    return summary(share.partition, share.split.labels[share.rows])


def client_names(federation: Federation) -> list[str]:
    """Name the clients: by their sites if each client is one site, else by number."""
    share, sites = federation.train, federation.dataset.sites
    numbers = [str(k) for k in range(len(share.partition.clients))]
    if share.split.sites is None or len(sites) != len(numbers):
        return numbers
    where = share.split.sites[share.rows]
    at_home = all((where[rows] == k).all() for k, rows in enumerate(share.partition.clients))
    return list(sites) if at_home else numbers


def positives(labels: NDArray[np.int8]) -> NDArray[np.intp]:
    """Count the images that show each class: (N, C) → (C,)."""
    return np.asarray((labels == 1).sum(axis=0))


def all_zero_share(labels: NDArray[np.int8]) -> float:
    """Return the share of images without a known positive label; nan without images; labels: (N, C)."""
    return float(1 - (labels == 1).any(axis=1).mean()) if len(labels) else math.nan


def _client(federation: Federation, k: int, counts: NDArray[np.intp]) -> dict[str, Any]:
    train, val = federation.train.partition, federation.val.partition
    allowed = zip(federation.dataset.classes, train.classes[k], strict=True)
    return {
        "name": client_names(federation)[k],
        "images": len(train.clients[k]),
        "val_images": len(val.clients[k]),
        "allowed_classes": [name for name, holds in allowed if holds],
        "positives": _by_class(federation, counts),
    }


def _by_class(federation: Federation, counts: NDArray[np.intp]) -> dict[str, int]:
    return dict(zip(federation.dataset.classes, counts.tolist(), strict=True))


def _number(value: float) -> float | None:
    """Turn nan, which JSON lacks, into None."""
    return None if math.isnan(value) else value
