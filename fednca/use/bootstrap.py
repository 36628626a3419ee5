"""Confidence intervals of multi-label metrics by resampling images, or groups of them, with replacement.

Scores are sorted once; a resample is only a count of how often each image was drawn.
"""

import math
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from fednca.base.randomness import numpy_rng
from fednca.measures.metrics import Metrics, multilabel_metrics

Floats = NDArray[np.float64]
BLOCK = 1 << 18  # image-class pairs handled at once: few enough for a core's cache


@dataclass(frozen=True)
class Resampling:
    """Settings of the bootstrap."""

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Scored:
    """Probabilities (N, C), labels (N, C) with -1 for unknown, thresholds (C,), and the group of each image (N,)."""

    probabilities: Floats
    labels: NDArray[np.int8]
    thresholds: Floats
    groups: NDArray[np.int64] | None = None

    def take(self, rows: NDArray[np.intp]) -> "Scored":
        """Return some of the images."""
        groups = None if self.groups is None else self.groups[rows]
        return Scored(self.probabilities[rows], self.labels[rows], self.thresholds, groups)

    def metrics(self) -> Metrics:
        """Return the metrics of all images."""
        return multilabel_metrics(*map(torch.from_numpy, (self.probabilities, self.labels, self.thresholds)))


def intervals(scored: Scored, how: Resampling) -> tuple[Metrics, Metrics]:
    """Return the lower and upper bound of each metric: percentiles over the resamples in which it is defined."""
    resample = Resampler(scored)
    rng, unit = numpy_rng(how.seed, "bootstrap"), units_of(scored)
    size = max(1, BLOCK // max(1, scored.labels.size))
    blocks = [
        resample(draw_weights(rng, unit, min(size, how.resamples - start))) for start in range(0, how.resamples, size)
    ]
    tail = 100 * (1 - how.confidence) / 2
    bounds = [_percentiles(values[~np.isnan(values)], [tail, 100 - tail]) for values in np.concatenate(blocks).T]
    low, high = (to_metrics(np.array(bound)) for bound in zip(*bounds, strict=True))
    return low, high


def _percentiles(values: Floats, percents: list[float]) -> Floats:
    found: Floats = np.percentile(values, percents) if len(values) else np.full(len(percents), math.nan)
    return found


def units_of(scored: Scored) -> NDArray[np.intp]:
    """Number the units to draw, groups or single images, and return each image's unit: (N,)."""
    if scored.groups is None:
        return np.arange(len(scored.labels))
    return np.unique(scored.groups, return_inverse=True)[1]


def draw_weights(rng: np.random.Generator, unit: NDArray[np.intp], resamples: int) -> Floats:
    """Draw resamples, each as many units as there are, and count how often each image is in them: (R, N)."""
    units = int(unit.max(initial=-1)) + 1
    draws = [rng.integers(units, size=units) for _ in range(resamples)]
    return np.stack([np.bincount(own, minlength=units)[unit] for own in draws]).astype(np.float64)


@dataclass(frozen=True)
class Curve:
    """Known scores from highest to lowest, with the image and the label of each: rows and positive, both (n,).

    ends: the last score of each group of equal ones. Equal scores lie on the same side of every threshold, so the
    curve has a point only there.
    """

    rows: NDArray[np.intp]
    positive: NDArray[np.bool_]
    ends: NDArray[np.intp]

    @classmethod
    def build(cls, p: Floats, labels: NDArray[np.int8], rows: NDArray[np.intp]) -> Self:
        """Sort the known ones of the scores p (n,)."""
        order = np.argsort(-p, kind="stable")
        order = order[labels[order] >= 0]
        ends = np.flatnonzero(np.append(np.diff(p[order]) != 0, len(order) > 0))
        return cls(rows[order], labels[order] == 1, ends)

    def areas(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return AUC and average precision (R,) of resamples (R, N)."""
        drawn = weights[:, self.rows]
        tp, claimed = (np.cumsum(each, axis=1)[:, self.ends] for each in (drawn * self.positive, drawn))
        tp_steps, fp_steps = (np.diff(each, axis=1, prepend=0) for each in (tp, claimed - tp))
        positives, negatives = tp_steps.sum(axis=1), fp_steps.sum(axis=1)
        auc = (fp_steps * (tp - tp_steps / 2)).sum(axis=1) / (positives * negatives)
        ap = (tp_steps * tp / np.maximum(claimed, 1)).sum(axis=1) / positives
        return auc, ap


class Resampler:
    """Metrics of resamples, in the order of `Metrics`: (R, N) → (R, 5 + 3·C), NaN where not defined."""

    def __init__(self, scored: Scored) -> None:
        """Sort the scores of each class, and all of them together."""
        p, labels = scored.probabilities, scored.labels
        rows, classes = np.arange(len(labels)), labels.shape[1]
        self.curves = [Curve.build(p[:, c], labels[:, c], rows) for c in range(classes)]
        self.together = Curve.build(p.ravel(), labels.ravel(), np.repeat(rows, classes))
        self.positive = (labels == 1).astype(np.float64)
        self.predicted = ((p > scored.thresholds) & (labels >= 0)).astype(np.float64)

    @np.errstate(divide="ignore", invalid="ignore")  # 0/0 gives NaN: not defined
    def __call__(self, weights: Floats) -> Floats:
        """Return the metrics of resamples; weights: (R, N), how often each image was drawn."""
        areas = [curve.areas(weights) for curve in self.curves]
        auc, ap = (np.stack(each, axis=1) for each in zip(*areas, strict=True))
        hits, predicted, positives = (
            weights @ each for each in (self.predicted * self.positive, self.predicted, self.positive)
        )
        f1 = _f1(hits, predicted, positives)
        micro_f1 = _f1(hits.sum(axis=1), predicted.sum(axis=1), positives.sum(axis=1))
        means = [_nanmean(auc), self.together.areas(weights)[0], _nanmean(f1), micro_f1, _nanmean(ap)]
        return np.concatenate([np.stack(means, axis=1), auc, f1, ap], axis=1)


def _f1(hits: Floats, predicted: Floats, positives: Floats) -> Floats:
    found: Floats = np.where(positives > 0, 2 * hits / (predicted + positives), math.nan)
    return found


def _nanmean(values: Floats) -> Floats:
    """Return the mean over the classes with a defined value: (R, C) → (R,)."""
    defined = ~np.isnan(values)
    mean: Floats = np.where(defined, values, 0).sum(axis=1) / defined.sum(axis=1)
    return mean


def to_metrics(row: Floats) -> Metrics:
    """Give the numbers of one resample their names."""
    names = [field.name for field in fields(Metrics)]
    per_class = [tuple(each.tolist()) for each in np.split(row[5:], 3)]
    return Metrics(**dict(zip(names, [*row[:5].tolist(), *per_class], strict=True)))
