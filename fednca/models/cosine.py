"""Heads that compare the pooled feature, scaled to unit length, with a fixed classifier."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednca.models.heads import Head, Output, pool


def unit_features(feature_map: Tensor, like: Tensor) -> Tensor:
    """Pool a feature map (B, d, H, W) and scale it to unit length, (B, d), in the dtype of `like`."""
    return F.normalize(pool(feature_map).to(like.dtype), dim=1)


class CosineHead(Head):
    """The feature's cosine with each class's fixed unit vector, times one learnable scale: s·z·m_c.

    prototypes: (C, d), the class vectors, which are not in the state dict.
    """

    prototypes: Tensor

    def __init__(self, prototypes: Tensor, scale: float) -> None:
        """Take the class vectors and the scale to start from."""
        super().__init__()
        self.register_buffer("prototypes", prototypes.clone(), persistent=False)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        with torch.autocast(feature_map.device.type, enabled=False):
            features = unit_features(feature_map, self.prototypes)
            return Output(self.scale * features @ self.prototypes.T, None, features)

    def classifier_weights(self) -> Tensor:
        """Return the prototypes."""
        return self.prototypes


class SphereHead(Head):
    """Scores W·z + b; W (C, d) and b () are fixed, but in the state dict, so that SphereFed can replace them."""

    weight: Tensor
    offset: Tensor

    def __init__(self, weight: Tensor, offset: float) -> None:
        """Take the W and b that the features are trained with."""
        super().__init__()
        self.register_buffer("weight", weight.clone())
        self.register_buffer("offset", torch.tensor(offset))

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        with torch.autocast(feature_map.device.type, enabled=False):
            features = unit_features(feature_map, self.weight)
            return Output(features @ self.weight.T + self.offset, None, features)

    def classifier_weights(self) -> Tensor:
        """Return W."""
        return self.weight
