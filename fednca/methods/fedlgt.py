"""FedLGT (Liu et al., 2024): a transformer over image and label tokens, whose label tokens are frozen text embeddings.

Training reveals some of an image's labels through their tokens and asks for the others, so that the model learns how
labels depend on each other; at test time nothing is revealed. As in C-Tran, how many labels are revealed is random for
each image. Client-aware masking hides a revealed label again if the global model is undecided about it. This is decided
for each label of each image of a batch (the authors' code looks at a batch's first image only).
"""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fednca.methods.contract import About, Learner, Local, Method, Tensors
from fednca.models.etf import orthonormal_rows
from fednca.models.heads import Head
from fednca.models.text import origin, resolve_source, text_table
from fednca.models.tokens import LabelTransformerHead


class LabelTransformerLearner(Learner):
    """BCE on the hidden labels, given the image and the revealed ones."""

    clip_norm: ClassVar[float | None] = 10.0

    text: str = "auto"
    """Label vectors: `clip`, `random` or a file of them; `auto` is `clip` if open_clip is installed, else `random`."""
    layers: int = Field(default=3, ge=1)
    """Number of transformer layers."""
    heads: int = Field(default=4, ge=1)
    """Number of attention heads."""
    ffn: int = Field(default=512, ge=1)
    """Hidden units of each layer's feed-forward net."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of units dropped in the transformer layers while training."""
    max_revealed: float = Field(default=0.75, ge=0, lt=1)
    """Largest share of an image's known labels that training shows to the model."""
    band_low: float = Field(default=0.48, ge=0, le=1)
    """Lowest probability at which the global model counts as undecided about a label, which is then hidden."""
    band_high: float = Field(default=0.52, ge=0, le=1)
    """Highest such probability; if it is below `band_low`, no label is hidden for being undecided."""
    table_seed: int = Field(default=0, ge=0)
    """Seed of the random vectors and the projection; the same for all clients, independent of the training seed."""

    @property
    def note(self) -> str:
        """Say where the text vectors come from."""
        return f"text table: {origin(self.text)}"

    def decided(self, pretrained: bool) -> Self:
        """Replace the text table `auto` by what it means on this machine."""
        return self.model_copy(update={"text": resolve_source(self.text)})

    def sketch(self) -> Self:
        """Return a learner with random vectors in place of a text table."""
        return self.model_copy(update={"text": "random"})

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the transformer on frozen text and state embeddings."""
        texts, _ = text_table(classes, dim, self.text, self.table_seed)
        states = orthonormal_rows(3, dim, self.table_seed, "state embeddings")
        return LabelTransformerHead(
            texts, states, layers=self.layers, heads=self.heads, ffn=self.ffn, dropout=self.dropout
        )

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return BCE, the mean over the labels that are known but not revealed."""
        with torch.no_grad():
            p = self.probabilities(local.global_model(images).logits)
        undecided = (p >= self.band_low) & (p <= self.band_high)
        revealed = draw_revealed(labels, self.max_revealed, local.rand) & ~undecided
        feature_map = model.get_submodule("backbone")(images)
        output = model.get_submodule("head")(feature_map, labels.masked_fill(~revealed, -1))
        return {"bce": self.loss(output.logits, labels.masked_fill(revealed, -1))}


def draw_revealed(labels: Tensor, most: float, rand: Callable[..., Tensor]) -> Tensor:
    """Choose which known labels (B, C) to reveal: n of an image's k, with n uniform in 0 … ⌊most·k⌋."""
    draws = rand(len(labels), labels.shape[1] + 1).to(labels.device)
    known = labels >= 0
    rank = draws[:, 1:].masked_fill(~known, 1).argsort(dim=1).argsort(dim=1)  # unknown labels come last
    most_revealed = (most * known.sum(dim=1, keepdim=True)).floor()
    return rank < (draws[:, :1] * (most_revealed + 1)).floor()


METHOD = Method(
    "fedlgt",
    About(
        summary="A transformer over an image and its labels; training shows it some labels, it predicts the others.",
        paper="Liu et al., 2024",
        head="transformer over image and label tokens",
        objective="BCE on hidden labels",
        formula="ŷ = σ(Transformer(F, t_c + e(revealed y_c))); L = BCE over hidden labels; w ← Σ_k w_k / K",
    ),
    LabelTransformerLearner(),
)
