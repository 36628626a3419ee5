"""Multi-label metrics that leave out, and say so, the classes for which they are not defined."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fednca.errors import FedncaError


@dataclass(frozen=True)
class Metrics:
    """Means over classes (macro) and over all known (sample, class) pairs (micro); NaN marks what is not defined.

    A class with one label value only has no AUC, a class without positives neither F1 nor AP: its entry in
    `class_…` is NaN and the mean leaves it out.
    """

    macro_auc: float
    micro_auc: float
    macro_f1: float
    micro_f1: float
    mean_ap: float
    class_auc: tuple[float, ...]
    class_f1: tuple[float, ...]
    class_ap: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics ready for JSON, NaN as None."""
        return {
            name: [_json(v) for v in value] if isinstance(value, tuple) else _json(value)
            for name, value in asdict(self).items()
        }


def multilabel_metrics(probabilities: Tensor, labels: Tensor, thresholds: float | Tensor = 0.5) -> Metrics:
    """Compare probabilities (N, C) with labels (N, C), multi-hot with -1 for unknown.

    thresholds: one for all classes or (C,); p > threshold counts as positive.
    """
    probabilities = probabilities.detach()
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise FedncaError("probabilities outside [0, 1] or not finite cannot be scored; apply a sigmoid to logits")
    known, positive = labels >= 0, labels == 1
    predicted = (probabilities > thresholds) & known
    true_positives = (predicted & positive).sum(dim=0)
    claims = predicted.sum(dim=0) + positive.sum(dim=0)  # 2·TP + FP + FN
    columns = [_ranking(p[k], y[k]) for p, y, k in zip(probabilities.T, positive.T, known.T, strict=True)]
    class_auc, class_ap = zip(*columns, strict=True)
    class_f1 = _f1(true_positives, claims, positive.sum(dim=0))
    micro_f1 = _f1(true_positives.sum(), claims.sum(), positive.sum())
    return Metrics(
        macro_auc=_mean_defined(class_auc),
        micro_auc=_ranking(probabilities[known], positive[known])[0],
        macro_f1=_mean_defined(class_f1.tolist()),
        micro_f1=micro_f1.item(),
        mean_ap=_mean_defined(class_ap),
        class_auc=class_auc,
        class_f1=tuple(class_f1.tolist()),
        class_ap=class_ap,
    )


def _ranking(p: Tensor, positive: Tensor) -> tuple[float, float]:
    """Return AUC and average precision of the known labels (n,) of one class, NaN where not defined."""
    p, order = p.sort(descending=True)
    cuts = F.pad(p, (0, 1), value=-1).diff() != 0  # tied probabilities fall on one side of every threshold
    tp = positive[order].double().cumsum(dim=0)[cuts]
    claimed = torch.arange(1, len(p) + 1, device=p.device)[cuts]
    positives, negatives = positive.sum(), (~positive).sum()
    auc = torch.trapezoid(F.pad(tp, (1, 0)), F.pad(claimed - tp, (1, 0))) / (positives * negatives)
    ap = (F.pad(tp, (1, 0)).diff() * tp / claimed).sum() / positives
    return auc.item(), ap.item()


def _f1(true_positives: Tensor, claims: Tensor, positives: Tensor) -> Tensor:
    """Return 2·TP / (2·TP + FP + FN) in float64, NaN without positives."""
    return (2 * true_positives.double() / claims).where(positives > 0, math.nan)


def _mean_defined(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).nanmean().item()


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
