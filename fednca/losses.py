"""The losses of the paper's equations and of its authors' code ("released"), as pure functions of tensors.

Shapes: logits (B, C); similarity A (B, C, C) with A[c, r] = h_c·m_r, the feature of class c times the vector of class
r; labels y (B, C): 1 present, 0 absent, -1 unknown. An unknown label is neither positive nor negative, and a batch
without known labels has loss 0. Everything is computed in float32 or more, even under autocast, and without branches
on data, so that a CUDA graph can capture it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fednca.errors import FedncaError
from fednca.models.heads import Output


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """Return the binary cross-entropy, averaged over all known labels."""
    return bce_sum(logits, y) * len(y) / (y >= 0).sum().clamp(min=1)


def bce_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Return the binary cross-entropy as in the authors' code: summed over known labels, averaged over samples."""
    logits = _precise(logits)
    target = y.clamp(min=0).to(logits.dtype)
    known = (y >= 0).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target, weight=known, reduction="sum") / max(1, len(y))


def balanced_bce(logits: Tensor, y: Tensor) -> Tensor:
    """Return the class-balanced BCE: half its mean over positive labels plus half its mean over negative ones."""
    logits = _precise(logits)
    _check_labels(y, logits.shape)
    terms = ((y == 1, F.softplus(-logits)), (y == 0, F.softplus(logits)))  # -log σ(a), -log(1 - σ(a))
    means = [(loss * chosen).sum() / chosen.sum().clamp(min=1) for chosen, loss in terms]
    return (means[0] + means[1]) / 2


def asymmetric(logits: Tensor, y: Tensor, gamma_neg: float = 4.0, gamma_pos: float = 0.0, clip: float = 0.05) -> Tensor:
    """Return the asymmetric loss (Ridnik et al., 2021), averaged over known labels: easy negatives count less.

    Larger gamma_neg and gamma_pos make easy negatives and positives count less. Negatives with a probability up to
    `clip` do not count at all.
    """
    logits = _precise(logits)
    _check_labels(y, logits.shape)
    p = logits.sigmoid()
    shifted = (p - clip).clamp(min=0)  # p_m
    log_not_p = F.logsigmoid(-logits)
    if clip:  # log(1 - p_m) = log(min(1 - p + clip, 1))
        log_not_p = torch.logaddexp(log_not_p, torch.full_like(logits, math.log(clip))).clamp(max=0)
    positive = -((1 - p) ** gamma_pos) * F.logsigmoid(logits)
    negative = -(shifted**gamma_neg) * log_not_p
    return (positive * (y == 1) + negative * (y == 0)).sum() / (y >= 0).sum().clamp(min=1)


CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bce": bce, "balanced": balanced_bce, "asl": asymmetric}


def negative_rejection(A: Tensor, y: Tensor, tau: float = 0.3) -> Tensor:
    """Push the features of absent classes away from the other classes' vectors that they resemble (eq. 12)."""
    if not 0 < tau < 1:
        raise FedncaError(f"tau is {tau}, but it is a threshold for probabilities; give a number between 0 and 1")
    A = _precise(A)
    num_classes = A.shape[-1]
    foreign = ~torch.eye(num_classes, dtype=torch.bool, device=A.device)
    confident = A.gt(math.log(tau / (1 - tau))) & foreign  # 1[σ(A) > τ] without the rounding of σ
    # eq. 12: -log(1 - σ(a)) = softplus(a), finite for every a
    per_class = (F.softplus(A) * confident).sum(dim=-1) / max(1, num_classes - 1)
    return _mean_over_classes(per_class, y == 0)


def positive_contrast(A: Tensor, y: Tensor) -> Tensor:
    """Pull the feature of each present class closer to its own vector than to the others (eq. 13)."""
    return _mean_over_classes(_own_prototype_loss(_precise(A)), y == 1)


def negative_rejection_released(A: Tensor, y: Tensor, scale: Tensor, bias: Tensor, tau: float = 0.3) -> Tensor:
    """Return negative rejection as in the authors' code: a hinge on each absent class's most confident class vector.

    Only the n hardest of the batch count, where n is its number of positive labels.
    scale: (), bias: (C,), those of the affine logits.
    """
    A = _precise(A)
    _check_labels(y, A.shape[:2])
    confidence = (scale * A + bias).amax(dim=-1).sigmoid()
    hinge = F.relu(confidence - tau) * (y == 0)
    # n depends on the data: sorting all pairs keeps the shapes fixed, which topk(n) would not.
    hardest = hinge.flatten().sort(descending=True).values
    kept = torch.arange(hardest.numel(), device=A.device) < (y == 1).sum()
    return (hardest * kept).sum() / max(1, len(y))


def positive_contrast_released(features: Tensor, y: Tensor, prototypes: Tensor, temperature: float = 0.07) -> Tensor:
    """Return positive contrast as in the authors' code: cross-entropy of a present class's cosines with all vectors.

    It is summed over classes and averaged over samples. features: (B, C, d), prototypes: (C, d).
    """
    with torch.autocast(features.device.type, enabled=False):
        features = _precise(features)
        cosine = F.normalize(features, dim=-1) @ F.normalize(prototypes.to(features.dtype), dim=-1).T
    _check_labels(y, features.shape[:2])
    return (_own_prototype_loss(cosine / temperature) * (y == 1)).sum() / max(1, len(y))


def objective(
    output: Output,
    y: Tensor,
    *,
    lambda1: float,
    lambda2: float,
    tau: float = 0.3,
    criterion: Callable[[Tensor, Tensor], Tensor] = bce,
) -> dict[str, Tensor]:
    """Return the weighted terms of the paper's objective, without those of weight 0."""
    terms = {"bce": criterion(output.logits, y)}
    if lambda1:
        terms["neg"] = lambda1 * negative_rejection(_similarity(output), y, tau)
    if lambda2:
        terms["pos"] = lambda2 * positive_contrast(_similarity(output), y)
    return terms


def objective_released(
    output: Output,
    y: Tensor,
    prototypes: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    lambda1: float,
    lambda2: float,
    tau: float = 0.3,
    criterion: Callable[[Tensor, Tensor], Tensor] = bce_sum,
) -> dict[str, Tensor]:
    """Return the weighted terms of the objective in the authors' code, without those of weight 0."""
    terms = {"bce": criterion(output.logits, y)}
    if lambda1:
        terms["neg"] = lambda1 * negative_rejection_released(_similarity(output), y, scale, bias, tau)
    if lambda2:
        terms["pos"] = lambda2 * positive_contrast_released(output.features, y, prototypes)
    return terms


def _check_labels(y: Tensor, shape: torch.Size) -> None:
    """Refuse labels of another shape, which would be broadcast."""
    if y.shape != shape:
        raise FedncaError(
            f"labels of shape {tuple(y.shape)} do not fit scores of shape {tuple(shape)}; give one label per score"
        )


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _similarity(output: Output) -> Tensor:
    if output.similarity is None:
        raise FedncaError(
            "this head has one feature for all classes; set lambda1 and lambda2 to 0, or use a head with LADM "
            "(attention that reads one feature per class)"
        )
    return output.similarity


def _own_prototype_loss(scores: Tensor) -> Tensor:
    """Return -log softmax_r(scores[c, :])[c]: (B, C, C) gives (B, C)."""
    return -scores.log_softmax(dim=-1).diagonal(dim1=1, dim2=2)


def _mean_over_classes(values: Tensor, chosen: Tensor) -> Tensor:
    """Average (B, C) over each sample's chosen classes, then over samples; a sample without any counts as 0."""
    _check_labels(chosen, values.shape)
    per_sample = (values * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
    return per_sample.mean() if len(per_sample) else per_sample.sum()
