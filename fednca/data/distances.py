"""How much clients differ, in the labels they have and in the labels that occur together."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def label_distance(counts: NDArray[np.integer]) -> float:
    """Return the mean Jensen-Shannon distance between the label distributions of all pairs of clients.

    0 means that all clients are alike, 1 that no two of them share a label. Clients without labels are left out; if
    fewer than two remain, the result is nan. counts: (K, C), positives of each client and class.
    """
    has_any = counts[counts.any(axis=1)]
    shares = has_any / has_any.sum(axis=1, keepdims=True)
    first, second = np.triu_indices(len(shares), 1)
    if not len(first):
        return math.nan
    middle = (shares[first] + shares[second]) / 2
    divergence = (_relative_entropy(shares[first], middle) + _relative_entropy(shares[second], middle)) / 2
    # For two equal distributions, rounding can give a divergence slightly below zero.
    return float(np.sqrt(np.maximum(divergence, 0)).mean())


def missing_classes(counts: NDArray[np.integer]) -> float:
    """Return the mean number of classes that a client has no positive of; counts: (K, C)."""
    return float((counts == 0).sum(axis=1).mean())


def cooccurrence_distance(labels: Sequence[NDArray[np.int8]]) -> float:
    """Return the mean Jensen-Shannon distance between the clients' distributions over pairs of labels in one image.

    Clients without such a pair are left out; if fewer than two remain, the result is nan.
    labels: one array (n_k, C) per client, as that client sees its labels.
    """
    return label_distance(np.stack([_pairs(own) for own in labels]))


def _pairs(labels: NDArray[np.int8]) -> NDArray[np.intp]:
    """Count the images that show both classes of each pair: (n, C) → (C (C - 1) / 2,)."""
    present = (labels == 1).astype(np.float64)  # integer matrix products are slow; float64 holds the counts exactly
    together = present.T @ present
    return np.asarray(together[np.triu_indices(len(together), 1)], np.intp)


def _relative_entropy(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Σ p log2(p / q) of each row, where 0 log 0 = 0."""
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0)
    return np.asarray((p * np.log2(ratio)).sum(axis=1))
