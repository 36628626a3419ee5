"""FedETF (Li et al., 2023): cosines of the pooled feature with a fixed simplex ETF, times a learnable scale.

The paper trains a single-label softmax; here each class has its own sigmoid, under the same head.
"""

from pydantic import Field
from torch import nn

from fednca.methods.base import About, Method, Task
from fednca.models import simplex_etf
from fednca.models.cosine import CosineHead
from fednca.options import Options


class FedETFHyper(Options):
    """FedETF's choices."""

    scale: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Initial value of the learnable scale of the cosines."""
    etf_seed: int = Field(default=0, ge=0)
    """Seed that orients the class vectors; the same for all clients, independent of the training seed."""


class FedETF(Method):
    """BCE on scaled cosines of the feature with fixed class vectors that are as far apart as possible (an ETF)."""

    Hyper = FedETFHyper
    about = About(
        paper="Li et al., 2023",
        head="unit feature + fixed class vectors (ETF)",
        formula="ŷ_c = σ(s·z·m_c), z = f/‖f‖, s learnable; w ← Σ_k w_k / K",
    )
    hyper: FedETFHyper

    def head(self, task: Task) -> nn.Module:
        """Build the cosine head on the ETF."""
        return CosineHead(simplex_etf(len(task.classes), task.dim, self.hyper.etf_seed), self.hyper.scale)


METHOD = FedETF
