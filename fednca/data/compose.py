"""Multi-label images made from single-label ones: one or two of them on a black canvas of twice their side."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.base.randomness import numpy_rng
from fednca.data.types import Dataset, Split

Sources = tuple[NDArray[np.uint8], NDArray[np.integer]]
"""Source images, (N, h, w) or (N, h, w, 1 or 3), and their classes, (N,)."""


def compose(
    images: NDArray[np.uint8],
    labels: NDArray[np.integer],
    num_classes: int,
    *,
    singles: int | None,
    pairs: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """Make `singles` canvases of one image per class (None: every image once), and `pairs` of two per pair of classes.

    A source image stands alone on at most one canvas, but may be part of any number of pairs.
    images: (N, h, w) or (N, h, w, 1 or 3); labels: (N,) → canvases (M, 2h, 2w, 3), multi-hot labels (M, C).
    """
    labels = np.asarray(labels, np.intp)
    members = [np.flatnonzero(labels == c) for c in range(num_classes)]
    alone = np.arange(len(labels)) if singles is None else _draw_singles(members, singles, rng)
    first, second = _draw_pairs(members, pairs, rng)

    sources = np.concatenate([alone, first])
    far = rng.random(len(sources)) < 0.5
    canvases = _place(images, sources, far, rng)
    couples = slice(len(alone), None)
    np.maximum(canvases[couples], _place(images, second, ~far[couples], rng), out=canvases[couples])

    hot = np.zeros((len(sources), num_classes), np.int8)
    hot[np.arange(len(sources)), labels[sources]] = 1
    hot[np.arange(len(alone), len(sources)), labels[second]] = 1
    return canvases, hot


def composed(name: str, classes: tuple[str, ...], sources: Mapping[str, Sources], options: Any) -> Dataset:  # noqa: ANN401
    """Compose a dataset from the source images and classes of its splits.

    options: the dataset's own, with a `seed` and, for each split, `train_pairs` and perhaps `train_singles`.
    """

    def split(part: str) -> Split:
        rng = numpy_rng(options.seed, f"{name} {part} composites")
        singles, pairs = getattr(options, f"{part}_singles", None), getattr(options, f"{part}_pairs")
        return Split(*compose(*sources[part], len(classes), singles=singles, pairs=pairs, rng=rng))

    return Dataset(name, classes, split("train"), split("val"), split("test"))


def _draw_singles(members: list[NDArray[np.intp]], singles: int, rng: np.random.Generator) -> NDArray[np.intp]:
    for c, rows in enumerate(members):
        if len(rows) < singles:
            raise FedncaError(f"class {c} has only {len(rows)} source images for {singles} singles; ask for fewer")
    return np.concatenate([rng.permutation(rows)[:singles] for rows in members])


def _draw_pairs(
    members: list[NDArray[np.intp]], pairs: int, rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    for c, rows in enumerate(members):
        if pairs and not len(rows):
            raise FedncaError(f"class {c} has no source image for its {pairs} composites per pair; set pairs to 0")
    chosen = [
        (rng.choice(members[a], pairs), rng.choice(members[b], pairs))
        for a, b in combinations(range(len(members) if pairs else 0), 2)
    ]
    none = np.empty(0, np.intp)
    return np.concatenate([none, *(a for a, _ in chosen)]), np.concatenate([none, *(b for _, b in chosen)])


def _place(
    images: NDArray[np.uint8], sources: NDArray[np.intp], far: NDArray[np.bool_], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Put each source image near the bottom-right corner (if `far`) or the top-left one, shifted inwards at random."""
    height, width = images.shape[1:3]
    colour = images if images.ndim == 4 else images[..., None]
    canvases = np.zeros((len(sources), 2 * height, 2 * width, 3), np.uint8)
    jitters = max(1, min(height, width) // 4)
    shift = rng.integers(jitters, size=len(sources))
    for by in range(jitters):
        top_left, bottom_right = (shift == by) & ~far, (shift == by) & far
        canvases[top_left, by : by + height, by : by + width] = colour[sources[top_left]]
        y, x = height - by, width - by
        canvases[bottom_right, y : y + height, x : x + width] = colour[sources[bottom_right]]
    return canvases
