"""A model is an encoder, which makes maps of images, and a head, which makes one logit per class of a map."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.plugins import check_call, find_plugin, plugin_names
from fednca.models.ladm import LADM


class Output(NamedTuple):
    """What every model returns for a batch."""

    logits: Tensor
    """(B, C)"""
    similarity: Tensor | None
    """(B, C, C), A[c, r] = h_c·m_r: each class's feature times every class vector, or None"""
    features: Tensor
    """(B, d) pooled, or (B, C, d) per class"""


def pool(feature_map: Tensor) -> Tensor:
    """Average a feature map (B, d, H, W) over its pixels, such that its gradient is channels-last too."""
    return feature_map.permute(0, 2, 3, 1).flatten(1, 2).mean(dim=1)


class Head(nn.Module):
    """Base of heads, which turn a map (B, d, H, W) into an `Output`; some also show class vectors or attention."""

    def classifier_weights(self) -> Tensor | None:
        """Return the vectors (C, d) that features are compared with, or None if there are layers in between."""
        return None

    def attention_maps(self, feature_map: Tensor) -> Tensor | None:
        """Return where each attention head looks for each class: (B, heads, C, H', W'), or None without attention."""
        return None


class LinearHead(Head):
    """One linear layer on the globally pooled feature."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, num_classes)

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        features = pool(feature_map)
        return Output(self.linear(features), None, features)

    def classifier_weights(self) -> Tensor:
        """Return the layer's weight."""
        return self.linear.weight.detach()


class MLPHead(Head):
    """The head "FC" of the authors' code, on the globally pooled feature: Linear, LayerNorm, GELU, Linear."""

    def __init__(self, dim: int, num_classes: int, hidden: int = 1024) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, num_classes)
        )

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        features = pool(feature_map)
        return Output(self.layers(features), None, features)


class _PrototypeHead(Head):
    """Base of heads that compare features with class vectors (prototypes), (C, d).

    The vectors are fixed and not in the state dict, unless `trainable`. `affine` adds the learnable scale and biases of
    the authors' code to the logits.
    """

    prototypes: Tensor
    scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, prototypes: Tensor, *, affine: bool = False, trainable: bool = False) -> None:
        super().__init__()
        if trainable:
            self.prototypes = nn.Parameter(prototypes.clone(memory_format=torch.contiguous_format))
        else:
            self.register_buffer("prototypes", prototypes.clone(), persistent=False)
        self.scale = nn.Parameter(torch.tensor(10.0)) if affine else None
        self.bias = nn.Parameter(torch.zeros(len(prototypes))) if affine else None

    def classifier_weights(self) -> Tensor:
        """Return the prototypes."""
        return self.prototypes.detach()

    def _dots(self, features: Tensor) -> Tensor:
        """Return the products of features (…, d) with all prototypes, (…, C), in full precision even under autocast.

        The vectors of an ETF sum to zero, so no feature is far from all of them. Rounded to bf16 they do not. A loss
        that asks for such a feature, as L_Neg does, then makes features grow without bound along that sum.
        """
        with torch.autocast(features.device.type, enabled=False):
            return features.to(self.prototypes.dtype) @ self.prototypes.T

    def _logits(self, dots: Tensor) -> Tensor:
        """Apply s·dot + b_c to the dot products (B, C) if the head is affine."""
        return dots if self.scale is None or self.bias is None else self.scale * dots + self.bias


class ETFHead(_PrototypeHead):
    """Dot products of the globally pooled feature z with the class vectors: logit_c = z·m_c."""

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        features = pool(feature_map)
        return Output(self._logits(self._dots(features)), None, features)


class LADMHead(_PrototypeHead):
    """Dot products of each class's own feature with its class vector: logit_c = h_c·m_c."""

    def __init__(self, ladm: LADM, prototypes: Tensor, *, affine: bool = False, trainable: bool = False) -> None:
        super().__init__(prototypes, affine=affine, trainable=trainable)
        if ladm.queries.shape != prototypes.shape:
            found = f"queries of shape {tuple(ladm.queries.shape)}, prototypes of shape {tuple(prototypes.shape)}"
            raise FedncaError(f"the attention and the head do not match: {found}; give both the same shape")
        self.ladm = ladm

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        features = self.ladm(feature_map)
        similarity = self._dots(features)  # A: (B, C, C)
        return Output(self._logits(similarity.diagonal(dim1=1, dim2=2)), similarity, features)

    def attention_maps(self, feature_map: Tensor) -> Tensor:
        """Return the weights of the label-aware attention."""
        return self.ladm.forward_with_attention(feature_map)[1]


POOLED_HEADS: dict[str, Callable[[int, int], Head]] = {"linear": LinearHead, "mlp": MLPHead}


def pooled_head(name: str) -> Callable[[int, int], Head]:
    """Return the builder of a head from (channels, classes): a name above, an entry point, or `package.module:Name`."""
    found: Callable[[int, int], Head] | None = POOLED_HEADS.get(name) or find_plugin("heads", name)
    if found is None:
        raise unknown_name("head", name, [*POOLED_HEADS, *plugin_names("heads")])
    if isinstance(found, nn.Module):
        raise FedncaError(f"head '{name}' is a {type(found).__name__} that is built already; name its class")
    check_call(f"head '{name}'", found, "dim, num_classes")
    return found


class Classifier(nn.Module):
    """An encoder (B, 3, H, W) → (B, d, H', W'), named `backbone` in weights, followed by a head."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Output:
        """Score images (B, 3, H, W)."""
        output: Output = self.head(self.backbone(images))
        return output


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model needs besides its weights (ETF, text vectors): the buffers that its state dict leaves out."""
    weights = model.state_dict()
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name not in weights}


def load_constants(model: nn.Module, constants: dict[str, Tensor]) -> None:
    """Put constants back into a model."""
    buffers = constants_of(model)
    for name, constant in constants.items():
        if name not in buffers or buffers[name].shape != constant.shape:
            raise FedncaError(f"the saved constant '{name}' does not fit the model; was the run's config.toml edited?")
        buffers[name].copy_(constant)
