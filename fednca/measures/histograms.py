"""Federated validation and test: metrics and thresholds from the sites' score histograms, pooled and by site."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fednca.config import CalibrateConfig
from fednca.measures.metrics import multilabel_metrics
from fednca.measures.thresholds import pick_thresholds

Record = dict[str, Any]
Histograms = Mapping[str, Tensor]  # int64 (2, C, bins + 1) for val and for test, negatives first


def expand(histograms: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (N, C) and labels (N, C) with these histograms, each score in the middle of its bin.

    Classes with fewer known labels than others are filled up with unknown ones.
    """
    _, classes, cells = histograms.shape
    bins = cells - 1
    middle = (torch.arange(cells, dtype=torch.float64) - 0.5).clamp(min=0) / bins  # the first cell holds zeros only
    rows = max(1, int(histograms.sum((0, 2)).max()))
    scores, labels = torch.zeros(rows, classes, dtype=torch.float64), torch.full((rows, classes), -1)
    for column in range(classes):
        counts = histograms[:, column].flatten()  # negatives, then positives
        known = int(counts.sum())
        scores[:known, column] = middle.repeat(2).repeat_interleave(counts)
        labels[:known, column] = torch.tensor([0, 1]).repeat_interleave(histograms[:, column].sum(-1))
    return scores, labels


def metrics_of(histograms: Tensor, thresholds: float | Tensor = 0.5) -> Record:
    """Return the metrics of scores known only by their histograms."""
    return multilabel_metrics(*expand(histograms), thresholds).as_dict()


def judge_histograms(sent: Mapping[str, Histograms], config: CalibrateConfig) -> tuple[Tensor, Record]:
    """Return thresholds (C,) chosen on the sites' validation shares, and all metrics for the round's record."""
    pooled = {part: torch.stack([own[part] for own in sent.values()]).sum(0) for part in ("val", "test")}
    thresholds = pick_thresholds(pooled["val"], config)
    record: Record = {part: metrics_of(histograms) for part, histograms in pooled.items()}
    record["calibrated"] = {"thresholds": thresholds.tolist()} | {
        part: metrics_of(histograms, thresholds) for part, histograms in pooled.items()
    }
    record["by_site"] = {
        site: {
            "val": means_of(own["val"]),
            "test": means_of(own["test"]),
            "calibrated": {part: means_of(own[part], thresholds) for part in ("val", "test")},
        }
        for site, own in sent.items()
    }
    return thresholds, record


def means_of(histograms: Tensor, thresholds: float | Tensor = 0.5) -> Record:
    """Return the metrics without those of single classes."""
    return {name: value for name, value in metrics_of(histograms, thresholds).items() if not name.startswith("class_")}
