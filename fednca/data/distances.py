"""How far clients are from each other, by what labels they have and which of them occur together."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def label_distance(counts: NDArray[np.integer]) -> float:
    """Average the Jensen-Shannon distance between the label distributions of all pairs of clients.

    0: all alike, 1: no label in common; clients without any label are left out, nan when fewer than two remain.
    counts: (K, C), positives of each client and class.
    """
    has_any = counts[counts.any(axis=1)]
    shares = has_any / has_any.sum(axis=1, keepdims=True)
    first, second = np.triu_indices(len(shares), 1)
    if not len(first):
        return math.nan
    middle = (shares[first] + shares[second]) / 2
    divergence = (_relative_entropy(shares[first], middle) + _relative_entropy(shares[second], middle)) / 2
    # Rounding can leave two equal distributions a hair below zero.
    return float(np.sqrt(np.maximum(divergence, 0)).mean())


def missing_classes(counts: NDArray[np.integer]) -> float:
    """Average over the clients how many classes they have no positive of; counts: (K, C)."""
    return float((counts == 0).sum(axis=1).mean())


def cooccurrence_distance(labels: Sequence[NDArray[np.int8]]) -> float:
    """Average the Jensen-Shannon distance between the clients' distributions over pairs of labels in one image.

    Clients without any such pair are left out; nan when fewer than two remain.
    labels: one (n_k, C) per client, as it sees them.
    """
    return label_distance(np.stack([_pairs(own) for own in labels]))


def _pairs(labels: NDArray[np.int8]) -> NDArray[np.intp]:
    """Count the images that have both labels of each unordered pair: (n, C) → (C (C - 1) / 2,)."""
    present = (labels == 1).astype(np.float64)  # integer products have no fast path; counts are exact in float64
    together = present.T @ present
    return np.asarray(together[np.triu_indices(len(together), 1)], np.intp)


def _relative_entropy(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Σ p log2(p / q) of each row, with 0 log 0 = 0."""
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0)
    return np.asarray((p * np.log2(ratio)).sum(axis=1))
