"""Where in an image a model finds a class: by its own attention if it has one, else by Grad-CAM.

Give models in evaluation mode, and images normalised as in training.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednca.models.heads import Head


def has_attention(model: nn.Module) -> bool:
    """Return whether a model's head has attention of its own."""
    return bool(getattr(model.get_submodule("head"), "attends", False))


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> Tensor | None:
    """Return where each attention head looks for each class: maps (B, heads, C, H', W') that each add up to 1.

    None if the head has no attention of its own.
    """
    head = model.get_submodule("head")
    return head.attention_maps(model.get_submodule("backbone")(images)) if isinstance(head, Head) else None


def grad_cam(model: nn.Module, images: Tensor, classes: Sequence[int]) -> Tensor:
    """Return Grad-CAM (Selvaraju et al., 2017) of the logits on the backbone's last map: (B, len(classes), H', W').

    A map is relu(Σ_d α_d F_d), where α_d is the mean over positions of the logit's gradient. Only the head is
    differentiated, so no activations of the backbone are kept.
    """
    with torch.inference_mode(False), torch.no_grad():
        feature_map = model.get_submodule("backbone")(images)
    with torch.inference_mode(False), torch.enable_grad():
        feature_map.requires_grad_()
        logits = model.get_submodule("head")(feature_map).logits
        cams = [_cam(feature_map, logits[:, c]) for c in classes]
    return torch.stack(cams, dim=1)


def _cam(feature_map: Tensor, logits: Tensor) -> Tensor:
    """Weight the map (B, d, H', W') by the gradients of one logit per image (B,): (B, H', W')."""
    (gradients,) = torch.autograd.grad(logits.sum(), feature_map, retain_graph=True)
    weights = gradients.mean(dim=(2, 3), keepdim=True)
    return (weights * feature_map).sum(dim=1).relu().detach()


def evidence(model: nn.Module, images: Tensor, classes: Sequence[int]) -> Tensor:
    """Return maps of the images' size, each scaled to a maximum of 1 unless it is 0: (B, len(classes), H, W).

    Attention is averaged over its heads.
    """
    attention = attention_maps(model, images)
    maps = grad_cam(model, images, classes) if attention is None else attention.mean(dim=1)[:, list(classes)]
    large = F.interpolate(maps, size=images.shape[-2:], mode="bilinear", align_corners=False)
    highest = large.amax(dim=(2, 3), keepdim=True)
    return (large / highest.where(highest > 0, 1)).clamp(0, 1)
