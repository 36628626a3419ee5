"""FedETF (Li et al., 2023): cosines of the pooled feature with a fixed simplex ETF, times a learnable scale.

The paper trains a single-label softmax; here each class has its own sigmoid, with the same head.
"""

from pydantic import Field

from fednca.methods.contract import About, Learner, Method
from fednca.models import simplex_etf
from fednca.models.cosine import CosineHead
from fednca.models.heads import Head


class CosineLearner(Learner):
    """BCE on scaled cosines with a fixed simplex ETF."""

    scale: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Initial value of the learnable scale of the cosines."""
    etf_seed: int = Field(default=0, ge=0)
    """Seed that orients the class vectors; the same for all clients, independent of the training seed."""

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the cosine head on the ETF."""
        return CosineHead(simplex_etf(len(classes), dim, self.etf_seed), self.scale)


METHOD = Method(
    "fedetf",
    About(
        summary="BCE on scaled cosines of a feature with fixed class vectors that lie as far apart as possible (ETF).",
        paper="Li et al., 2023",
        head="unit feature + fixed class vectors (ETF)",
        formula="ŷ_c = σ(s·z·m_c), z = f/‖f‖, s learnable; w ← Σ_k w_k / K",
    ),
    CosineLearner(),
)
