"""FedAvg with a Query2Label / ML-Decoder head (Liu et al., 2021; Ridnik et al., 2023): attention without an ETF.

It tells apart what FedNCA-ML owes to a feature per class from what it owes to the fixed ETF.
"""

from pydantic import Field
from torch import nn

from fednca.methods.base import About, Method, Task
from fednca.models.tokens import DecoderHead
from fednca.options import Options


class MLDecoderHyper(Options):
    """The decoder's choices."""

    heads: int = Field(default=4, ge=1)
    """Number of attention heads."""
    position: bool = True
    """Tell the attention where in the image a feature is, as FedNCA-ML does."""


class MLDecoder(Method):
    """BCE on one attention feature per class, read by learnable queries and scored by learnable weights."""

    Hyper = MLDecoderHyper
    about = About(
        paper="Liu et al., 2021; Ridnik et al., 2023",
        head="class queries + decoder layer",
        formula="h = LN(q + Attn(q, F)), ŷ_c = σ(w_c·LN(h_c + FFN(h_c)) + b_c); w ← Σ_k w_k / K",
    )
    hyper: MLDecoderHyper

    def head(self, task: Task) -> nn.Module:
        """Build the decoder layer and one classifier per class."""
        return DecoderHead(task.dim, len(task.classes), self.hyper.heads, self.hyper.position)


METHOD = MLDecoder
