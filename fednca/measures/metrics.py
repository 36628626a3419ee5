"""Multi-label metrics; where one is not defined for a class, it is NaN and left out of the mean."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fednca.base.errors import FedncaError

SHOWN = {"macro_auc": "macro-AUC", "macro_f1": "macro-F1", "micro_auc": "micro-AUC", "micro_f1": "micro-F1"}


@dataclass(frozen=True)
class Metrics:
    """Metrics over classes (macro: their mean) and over all known pairs of sample and class (micro).

    A class whose known labels are all the same has no AUC, and a class without positives has neither F1 nor AP. Its
    entry in `class_…` is NaN, and the mean leaves it out.
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
        """Return the metrics ready for JSON, with None for NaN."""
        return {
            name: [_json(v) for v in value] if isinstance(value, tuple) else _json(value)
            for name, value in asdict(self).items()
        }


def multilabel_metrics(probabilities: Tensor, labels: Tensor, thresholds: float | Tensor = 0.5) -> Metrics:
    """Compare probabilities (N, C) with labels (N, C): 1 present, 0 absent, -1 unknown.

    thresholds: one for all classes, or (C,); p > threshold counts as positive.
    """
    probabilities = probabilities.detach()
    if not len(labels):  # same as one image with unknown labels: there is nothing to rank
        probabilities, labels = (torch.full((1, labels.shape[1]), value, device=labels.device) for value in (0.0, -1))
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise FedncaError("probabilities are outside [0, 1] or not finite; apply a sigmoid to logits first")
    known, positive = labels >= 0, labels == 1
    f1 = _f1_scores(probabilities, known, positive, thresholds)
    auc, ap = _rankings(probabilities, positive, known)
    together = [each.reshape(-1, 1) for each in (probabilities, positive, known)]
    micro_auc, _ = _rankings(*together)
    means = torch.stack([auc.nanmean(), micro_auc[0], ap.nanmean()])
    found, class_auc, f1_found, class_ap = _to_host(means, auc, f1, ap)  # one copy: waits for the device once
    macro_auc, micro, mean_ap = found
    return Metrics(
        macro_auc=macro_auc,
        micro_auc=micro,
        mean_ap=mean_ap,
        class_auc=tuple(class_auc),
        class_ap=tuple(class_ap),
        **_named(f1_found),
    )


def at_thresholds(metrics: Metrics, probabilities: Tensor, labels: Tensor, thresholds: Tensor) -> Metrics:
    """Return the metrics of the same scores with F1 at other thresholds; AUC and AP do not depend on them."""
    return replace(metrics, **_named(_f1_scores(probabilities, labels >= 0, labels == 1, thresholds).tolist()))


def _f1_scores(probabilities: Tensor, known: Tensor, positive: Tensor, thresholds: float | Tensor) -> Tensor:
    """Return F1 of each class, over all pairs (micro) and on average (macro): (C + 2,)."""
    predicted = (probabilities > thresholds) & known
    true_positives, positives = (predicted & positive).sum(dim=0), positive.sum(dim=0)
    claims = predicted.sum(dim=0) + positives  # 2·TP + FP + FN
    by_class = _f1(true_positives, claims, positives)
    micro = _f1(true_positives.sum(), claims.sum(), positives.sum())
    return torch.cat([by_class, torch.stack([micro, by_class.nanmean()])])


def _named(f1: list[float]) -> dict[str, Any]:
    *by_class, micro, macro = f1
    return {"class_f1": tuple(by_class), "micro_f1": micro, "macro_f1": macro}


def _rankings(probabilities: Tensor, positive: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return AUC and average precision (C,) of the known labels of each column (N, C), NaN where not defined."""
    p, order = probabilities.masked_fill(~known, -1).sort(dim=0, descending=True)  # unknown ones come last
    tp, claimed = (each.gather(0, order).double().cumsum(dim=0) for each in (positive & known, known))
    fp = claimed - tp
    # Equal probabilities fall on the same side of every threshold, so a step of the curve goes from the end of one
    # group of equals to the end of the next.
    starts = F.pad(p.diff(dim=0) != 0, (0, 0, 1, 0), value=True)
    ends = F.pad(starts[1:], (0, 0, 0, 1), value=True)
    tp_before, fp_before = (_before_group(each, starts) for each in (tp, fp))
    positives, negatives = tp[-1], fp[-1]
    auc = ((fp - fp_before) * (tp + tp_before) / 2 * ends).sum(dim=0) / (positives * negatives)
    ap = ((tp - tp_before) * tp / claimed.clamp(min=1) * ends).sum(dim=0) / positives
    return auc, ap


def _before_group(counts: Tensor, starts: Tensor) -> Tensor:
    """Return, for each row of running counts (N, C), the count before its group of equal probabilities."""
    before = F.pad(counts[:-1], (0, 0, 1, 0))
    return (before * starts).cummax(dim=0).values


def _f1(true_positives: Tensor, claims: Tensor, positives: Tensor) -> Tensor:
    """Return 2·TP / (2·TP + FP + FN) in float64, or NaN without positives."""
    return (2 * true_positives.double() / claims).where(positives > 0, math.nan)


def _to_host(*tensors: Tensor) -> list[list[float]]:
    """Return vectors as lists, with a single copy from the device."""
    return [each.tolist() for each in torch.split(torch.cat(tensors).cpu(), [len(tensor) for tensor in tensors])]


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
