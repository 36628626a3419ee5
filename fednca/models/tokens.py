"""Heads that read one feature per class from the map by attention, and score it with learnt weights."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from fednca.base.errors import FedncaError
from fednca.models.heads import Head, Output
from fednca.models.ladm import LADM


class PerClassLinear(nn.Linear):
    """One weight vector and bias per class, for that class's own feature: (B, C, d) → (B, C)."""

    def forward(self, features: Tensor) -> Tensor:
        """Score each class by its own feature."""
        return (features * self.weight).sum(dim=-1) + self.bias


class DecoderHead(Head):
    """One decoder layer: learnable class queries attend to the map, but not to each other."""

    attends: ClassVar[bool] = True

    def __init__(self, dim: int, num_classes: int, heads: int = 4, position: bool = True) -> None:
        """Build attention and a feed-forward net of 2d hidden units, each with a residual connection and LayerNorm."""
        super().__init__()
        queries = torch.randn(num_classes, dim)
        self.attention = LADM(dim, queries, heads=heads, position=position, learnable_queries=True)
        self.norm1 = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)
        self.classifier = PerClassLinear(dim, num_classes)

    def forward(self, feature_map: Tensor) -> Output:
        """Score a feature map (B, d, H, W)."""
        attended = self.norm1(self.attention.queries + self.attention(feature_map))
        features = self.norm2(attended + self.ffn(attended))
        return Output(self.classifier(features), None, features)

    def classifier_weights(self) -> Tensor:
        """Return the classifiers' weights."""
        return self.classifier.weight.detach()

    def attention_maps(self, feature_map: Tensor) -> Tensor:
        """Return the weights of the cross-attention."""
        return self.attention.forward_with_attention(feature_map)[1]


class LabelTransformerHead(Head):
    """Self-attention over the map's positions and one token per label.

    A label's token is the sum of its text vector and the vector of its state: unknown, negative or positive.
    texts: (C, d), states: (3, d); both are fixed and not in the state dict.
    """

    texts: Tensor
    states: Tensor

    def __init__(self, texts: Tensor, states: Tensor, *, layers: int, heads: int, ffn: int, dropout: float) -> None:
        """Build LayerNorm, post-norm encoder layers and the classifier."""
        super().__init__()
        num_classes, dim = texts.shape
        if dim % heads:
            raise FedncaError(f"{heads} attention heads do not divide {dim} channels; use a divisor of {dim}")
        self.register_buffer("texts", texts.clone(), persistent=False)
        self.register_buffer("states", states.clone(), persistent=False)
        self.norm = nn.LayerNorm(dim)
        # nn.TransformerEncoder would start every layer as a copy of the first.
        self.encoder = nn.Sequential(
            *(nn.TransformerEncoderLayer(dim, heads, ffn, dropout, batch_first=True) for _ in range(layers))
        )
        self.classifier = PerClassLinear(dim, num_classes)

    def forward(self, feature_map: Tensor, known: Tensor | None = None) -> Output:
        """Score a feature map (B, d, H, W), given some of its labels.

        known: (B, C), 1 or 0 for a revealed label and -1 for a hidden one; by default all are hidden.
        """
        image_tokens = feature_map.flatten(2).transpose(1, 2)  # (B, S, d)
        num_classes = len(self.texts)
        if known is None:
            known = image_tokens.new_full((image_tokens.shape[0], num_classes), -1)
        label_tokens = self.texts + self.states[known.long() + 1]  # (B, C, d)
        tokens = self.encoder(self.norm(torch.cat([image_tokens, label_tokens], dim=1)))
        features = tokens[:, -num_classes:]
        return Output(self.classifier(features), None, features)

    def classifier_weights(self) -> Tensor:
        """Return the classifiers' weights."""
        return self.classifier.weight.detach()
