"""FedAvg with a Query2Label / ML-Decoder head (Liu et al., 2021; Ridnik et al., 2023): attention without an ETF.

It shows how much of FedNCA-ML's result comes from a feature per class, and how much from the fixed ETF.
"""

from pydantic import Field

from fednca.methods.contract import About, Learner, Method
from fednca.models.heads import Head
from fednca.models.tokens import DecoderHead


class DecoderLearner(Learner):
    """BCE on one attention feature per class, read by learnable queries and scored by learnable weights."""

    heads: int = Field(default=4, ge=1)
    """Number of attention heads."""
    position: bool = True
    """Tell the attention where in the image a feature is, as FedNCA-ML does."""

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the decoder layer and one classifier per class."""
        return DecoderHead(dim, len(classes), self.heads, self.position)


METHOD = Method(
    "ml-decoder",
    About(
        summary="BCE on one attention feature per class, read by learnable queries and scored by learnable weights.",
        paper="Liu et al., 2021; Ridnik et al., 2023",
        head="class queries + decoder layer",
        formula="h = LN(q + Attn(q, F)), ŷ_c = σ(w_c·LN(h_c + FFN(h_c)) + b_c); w ← Σ_k w_k / K",
    ),
    DecoderLearner(),
)
