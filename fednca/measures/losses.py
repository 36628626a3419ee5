"""The paper's equations and their released counterparts, as pure functions of tensors.

Shapes: logits (B, C); similarity A (B, C, C) with A[c, r] = h_c·m_r; labels y (B, C) multi-hot, where -1 marks an
unknown label, which is neither positive nor negative; a batch without any known label, an empty one too, has loss 0.
Everything is computed in float32 at least, whatever autocast says, and without control flow on data, so that a CUDA
graph can capture it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fednca.base.errors import FedncaError
from fednca.models.heads import Output


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy, the mean over all known labels."""
    return bce_sum(logits, y) * len(y) / (y >= 0).sum().clamp(min=1)


def bce_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy as released: the sum over a sample's known labels, the mean over samples."""
    logits = _precise(logits)
    target = y.clamp(min=0).to(logits.dtype)
    known = (y >= 0).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target, weight=known, reduction="sum") / max(1, len(y))


def balanced_bce(logits: Tensor, y: Tensor) -> Tensor:
    """Half the mean of BCE over the positive pairs plus half its mean over the negative ones."""
    logits = _precise(logits)
    _check_labels(y, logits.shape)
    terms = ((y == 1, F.softplus(-logits)), (y == 0, F.softplus(logits)))  # -log σ(a), -log(1 - σ(a))
    means = [(loss * chosen).sum() / chosen.sum().clamp(min=1) for chosen, loss in terms]
    return (means[0] + means[1]) / 2


def asymmetric(logits: Tensor, y: Tensor, gamma_neg: float = 4.0, gamma_pos: float = 0.0, clip: float = 0.05) -> Tensor:
    """Asymmetric loss (Ridnik et al., 2021), the mean over known pairs: easy negatives count less, the easiest not."""
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
    """Push the features of absent classes away from every foreign prototype they resemble (eq. 12)."""
    if not 0 < tau < 1:
        raise FedncaError(f"tau is {tau}, which is no probability to be surer than; give a number between 0 and 1")
    A = _precise(A)
    num_classes = A.shape[-1]
    foreign = ~torch.eye(num_classes, dtype=torch.bool, device=A.device)
    confident = A.gt(math.log(tau / (1 - tau))) & foreign  # 1[σ(A) > τ] without the rounding of σ
    # eq. 12: -log(1 - σ(a)) = softplus(a), finite for every a
    per_class = (F.softplus(A) * confident).sum(dim=-1) / max(1, num_classes - 1)
    return _mean_over_classes(per_class, y == 0)


def positive_contrast(A: Tensor, y: Tensor) -> Tensor:
    """Pull the feature of each present class closer to its own prototype than to the others (eq. 13)."""
    return _mean_over_classes(_own_prototype_loss(_precise(A)), y == 1)


def negative_rejection_released(A: Tensor, y: Tensor, scale: Tensor, bias: Tensor, tau: float = 0.3) -> Tensor:
    """Apply a hinge to the most confident prototype of each absent class, for the n hardest of the batch only.

    scale: (), bias: (C,), those of the affine logits; n is the number of positive pairs in the batch.
    """
    A = _precise(A)
    _check_labels(y, A.shape[:2])
    confidence = (scale * A + bias).amax(dim=-1).sigmoid()
    hinge = F.relu(confidence - tau) * (y == 0)
    # n depends on the data: ranking all pairs keeps the shapes fixed, which topk(n) would not
    hardest = hinge.flatten().sort(descending=True).values
    kept = torch.arange(hardest.numel(), device=A.device) < (y == 1).sum()
    return (hardest * kept).sum() / max(1, len(y))


def positive_contrast_released(features: Tensor, y: Tensor, prototypes: Tensor, temperature: float = 0.07) -> Tensor:
    """Cross-entropy of each present class's cosines with all prototypes, summed over classes, mean over samples.

    features: (B, C, d), prototypes: (C, d).
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
    """Return the weighted terms of the paper's objective, those of weight 0 left out."""
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
    """Return the weighted terms of the released objective, those of weight 0 left out."""
    terms = {"bce": criterion(output.logits, y)}
    if lambda1:
        terms["neg"] = lambda1 * negative_rejection_released(_similarity(output), y, scale, bias, tau)
    if lambda2:
        terms["pos"] = lambda2 * positive_contrast_released(output.features, y, prototypes)
    return terms


def _check_labels(y: Tensor, shape: torch.Size) -> None:
    """Refuse labels that would be broadcast."""
    if y.shape != shape:
        raise FedncaError(f"labels of shape {tuple(y.shape)} are not of the scores' shape {tuple(shape)}")


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _similarity(output: Output) -> Tensor:
    if output.similarity is None:
        raise FedncaError("this head has one feature for all classes; set lambda1 and lambda2 to 0 or use a LADM head")
    return output.similarity


def _own_prototype_loss(scores: Tensor) -> Tensor:
    """Return -log softmax_r(scores[c, :])[c]: (B, C, C) gives (B, C)."""
    return -scores.log_softmax(dim=-1).diagonal(dim1=1, dim2=2)


def _mean_over_classes(values: Tensor, chosen: Tensor) -> Tensor:
    """Average (B, C) over each sample's chosen classes, then over samples; a sample without any counts as 0."""
    _check_labels(chosen, values.shape)
    per_sample = (values * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
    return per_sample.mean() if len(per_sample) else per_sample.sum()
