"""FedAvg (McMahan et al., 2017): local training on BCE, plain average of weights and buffers."""

from fednca.methods.contract import About, Learner, Method
from fednca.models.heads import Head, pooled_head


class LinearLearner(Learner):
    """BCE on the globally pooled feature."""

    head: str = "linear"
    """`linear`: one layer, as in FedNCA-ML's paper; `mlp`: two, as in its authors' code; or `package.module:Name`."""

    def build_head(self, classes: tuple[str, ...], dim: int) -> Head:
        """Build the chosen head."""
        return pooled_head(self.head)(dim, len(classes))


METHOD = Method(
    "fedavg",
    About(
        summary="Clients train on BCE with a linear head, and the server averages weights and BatchNorm statistics.",
        paper="McMahan et al., 2017",
        formula="w ← Σ_k w_k / K",
    ),
    LinearLearner(),
)
