"""FedLGT (Liu et al., 2024): a transformer over image and label tokens, whose label tokens are frozen text embeddings.

Training reveals some of a sample's labels through their tokens and asks for the others, so that label dependencies are
learnt; at test time nothing is revealed. As in C-Tran, how many are revealed is drawn for each sample. Client-aware
masking hides a revealed label again wherever the global model is undecided about it. The decision is made for each
label of each sample, throughout the batch (the authors' code looks at a batch's first sample only).
"""

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fednca.losses import bce
from fednca.methods.base import About, Local, Method, Task, Tensors
from fednca.models.etf import orthonormal_rows
from fednca.models.text import kept_table, origin, resolve_source, text_table
from fednca.models.tokens import LabelTransformerHead
from fednca.options import Options


class FedLGTHyper(Options):
    """FedLGT's choices."""

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


class FedLGT(Method):
    """A transformer over the image and its labels: training shows it some of the labels, and it predicts the others."""

    Hyper = FedLGTHyper
    about = About(
        paper="Liu et al., 2024",
        head="transformer over image and label tokens",
        objective="BCE on hidden labels",
        formula="ŷ = σ(Transformer(F, t_c + e(revealed y_c))); L = BCE over hidden labels; w ← Σ_k w_k / K",
    )
    clip_norm = 10.0
    hyper: FedLGTHyper

    def settle(self) -> None:
        """Decide which text table `auto` stands for."""
        self.with_hyper(text=resolve_source(self.hyper.text))
        self.note = f"text table: {origin(self.hyper.text)}"

    @classmethod
    def sketch(cls) -> Self:
        """Create the method on random text embeddings."""
        return cls(FedLGTHyper(text="random"))

    def head(self, task: Task) -> nn.Module:
        """Build the transformer on frozen text and state embeddings."""
        hyper = self.hyper
        if self.kept_texts is not None and self.kept_texts.is_file():
            texts = kept_table(self.kept_texts, (len(task.classes), task.dim))
        else:
            texts, _ = text_table(task.classes, task.dim, hyper.text, hyper.table_seed)
        states = orthonormal_rows(3, task.dim, hyper.table_seed, "state embeddings")
        return LabelTransformerHead(
            texts, states, layers=hyper.layers, heads=hyper.heads, ffn=hyper.ffn, dropout=hyper.dropout
        )

    def losses(self, model: nn.Module, images: Tensor, labels: Tensor, local: Local) -> Tensors:
        """Return BCE, the mean over the labels that are known but not revealed."""
        with torch.no_grad():
            p = self.probabilities(local.global_model(images).logits)
        undecided = (p >= self.hyper.band_low) & (p <= self.hyper.band_high)
        revealed = draw_revealed(labels, self.hyper.max_revealed, local.rand) & ~undecided
        feature_map = model.get_submodule("backbone")(images)
        output = model.get_submodule("head")(feature_map, labels.masked_fill(~revealed, -1))
        criterion = self.criterion or bce
        return {"bce": criterion(output.logits, labels.masked_fill(revealed, -1))}


def draw_revealed(labels: Tensor, most: float, rand: Callable[..., Tensor]) -> Tensor:
    """Choose which known labels (B, C) to reveal: n of a sample's k, with n uniform in 0 … ⌊most·k⌋."""
    draws = rand(len(labels), labels.shape[1] + 1).to(labels.device)
    known = labels >= 0
    rank = draws[:, 1:].masked_fill(~known, 1).argsort(dim=1).argsort(dim=1)  # unknown labels come last
    most_revealed = (most * known.sum(dim=1, keepdim=True)).floor()
    return rank < (draws[:, :1] * (most_revealed + 1)).floor()


METHOD = FedLGT
