"""Neural collapse: how close features are to one point per class, and these points to a simplex.

NC1 and NC3 are the measures of Papyan, Han and Donoho (2020); NC2 is the single number that Zhu et al. (2021) use for
their two. An image with several labels counts once for each of them: by its feature for that class if the model has
one per class, else by its pooled feature. Every class weighs the same, however rare; a class without positives is left
out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fednca.base.errors import FedncaError
from fednca.models.heads import Head

NEGLIGIBLE = 1e-10  # singular values of the class means below this share of the largest are rounding


@dataclass(frozen=True)
class Pairs:
    """One feature for each pair of an image and a label of it."""

    features: Tensor  # (P, d)
    classes: Tensor  # (P,)
    images: Tensor  # (P,), numbered across the batches


@torch.no_grad()
def positive_pairs(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Pairs:
    """Collect the features of all positive labels: h_c if features are per class, else the pooled one each time."""
    found, seen = [], 0
    for images, labels in batches:
        features = model(images).features
        image, label = (labels == 1).nonzero(as_tuple=True)
        own = features[image, label] if features.ndim == 3 else features[image]
        found.append((own.double(), label, image + seen))
        seen += len(images)
    if not found:
        raise FedncaError("neural collapse needs images to be measured on, but there are none; give at least one batch")
    return Pairs(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def class_means(pairs: Pairs, num_classes: int) -> Tensor:
    """Average the features of each class: (C, d), NaN for a class without positives."""
    sums = pairs.features.new_zeros(num_classes, pairs.features.shape[1]).index_add_(0, pairs.classes, pairs.features)
    return sums / pairs.classes.bincount(minlength=num_classes)[:, None]


def measure_collapse(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    """Measure NC1, NC2 and NC3 of a model in evaluation mode on labelled images; None if not defined."""
    pairs, head = positive_pairs(model, batches), model.get_submodule("head")
    W = head.classifier_weights() if isinstance(head, Head) else None
    num_classes = int(pairs.classes.max()) + 1 if len(pairs.classes) else 0
    M = class_means(pairs, num_classes)
    present = M.isfinite().all(dim=1)
    centred = M[present] - M[present].mean(dim=0)
    if len(centred) < 2 or not centred.any():
        return {"nc1": None, "nc2": None, "nc3": None}
    return {
        "nc1": variability(pairs, M, centred),
        "nc2": distance_to_simplex(centred),
        "nc3": None if W is None else distance_to_classifier(centred, W[:num_classes][present].double()),
    }


def variability(pairs: Pairs, M: Tensor, centred: Tensor) -> float:
    """Return NC1 = tr(Σ_W Σ_B⁺) / C, where Σ_W and Σ_B are within-class and between-class covariances.

    M: class means (C, d); centred: those that exist, minus their mean. With Σ_B = centredᵀ·centred / C, the trace is
    the mean over classes of E‖(h - μ_c) centred⁺‖² times C, which needs no d x d matrix.
    """
    away = (pairs.features - M[pairs.classes]) @ torch.linalg.pinv(centred, rtol=NEGLIGIBLE)
    counts = pairs.classes.bincount(minlength=len(M)).double()
    return float((away.square().sum(dim=1) / counts[pairs.classes]).sum() / len(centred))


def distance_to_simplex(centred: Tensor) -> float:
    """Return NC2 = ‖G/‖G‖ - G*/‖G*‖‖ of the Gram matrices of centred class means (C, d) and of a simplex ETF."""
    C = len(centred)
    G = centred @ centred.T
    simplex = torch.eye(C, dtype=G.dtype, device=G.device) - 1 / C  # a multiple of the ETF's Gram matrix
    return float((G / G.norm() - simplex / (C - 1) ** 0.5).norm())


def distance_to_classifier(centred: Tensor, W: Tensor) -> float | None:
    """Return NC3 = ‖M/‖M‖ - W/‖W‖‖² of centred class means and classifier, both (C, d); None if W is 0."""
    return float((centred / centred.norm() - W / W.norm()).square().sum()) if W.any() else None
