"""Federated threshold calibration: clients send histograms of their scores, the server picks a threshold per class.

A client counts, on its own held-out share, how many scores of each class fall between two neighbouring candidate
thresholds, positives and negatives apart. Only these counts leave it. With fine bins the result is that of choosing on
the pooled scores.
"""

import torch
from torch import Tensor

from fednca.config import CalibrateConfig

UNCALIBRATED = 0.5  # the threshold of a class without positives or without negatives to choose by
ROUNDING = 1e-9  # (1 - 0.9) * 10 is a little less than 1


def candidates(bins: int) -> Tensor:
    """Return the thresholds 0, 1/bins, …, (bins - 1)/bins."""
    return torch.arange(bins, dtype=torch.float64) / bins


def score_histograms(probabilities: Tensor, labels: Tensor, config: CalibrateConfig) -> Tensor:
    """Count a client's scores by label, class and number of candidates below the score; unknown labels do not count.

    probabilities, labels: (N, C) → int64 (2, C, bins + 1), negatives first; counts under `min_count` are withheld.
    """
    classes, bins = labels.shape[1], config.bins
    above = torch.bucketize(probabilities.double(), candidates(bins).to(probabilities.device))  # p > t_b ⇔ above > b
    cell = (labels == 1) * classes * (bins + 1) + torch.arange(classes, device=labels.device) * (bins + 1) + above
    counts = torch.bincount(cell[labels >= 0], minlength=2 * classes * (bins + 1))
    counts = counts.where(counts >= config.min_count, 0)
    return counts.view(2, classes, bins + 1)


def pick_thresholds(histograms: Tensor, config: CalibrateConfig) -> Tensor:
    """Pick each class's threshold from the sum of the clients' histograms: (2, C, bins + 1) → (C,).

    `f1`: best F1; `sensitivity`: the highest threshold that reaches the target; `specificity`: the lowest that does.
    """
    thresholds = candidates(config.bins).to(histograms.device)
    # How many scores lie above each candidate: (C, bins)
    false_positives, true_positives = histograms.double().flip(-1).cumsum(-1).flip(-1)[:, :, 1:]
    negatives, positives = histograms.sum(-1).double()[..., None]
    if config.goal == "f1":
        f1 = 2 * true_positives / (true_positives + false_positives + positives)
        to_half = (thresholds - UNCALIBRATED).abs().where(f1 == f1.amax(-1, keepdim=True), torch.inf)
        chosen = thresholds[to_half.argmin(-1)]  # of the best, the one nearest to 0.5
    elif config.goal == "sensitivity":
        reached = true_positives >= config.target * positives - ROUNDING
        chosen = torch.where(reached, thresholds, -1).amax(-1)
        chosen = chosen.clamp(min=0)  # a score of exactly 0 is never above a threshold
    else:
        reached = false_positives <= (1 - config.target) * negatives + ROUNDING
        chosen = torch.where(reached, thresholds, 2).amin(-1).clamp(max=float(thresholds[-1]))
    return chosen.where((positives[:, 0] > 0) & (negatives[:, 0] > 0), UNCALIBRATED)
