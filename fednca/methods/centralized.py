"""Training without a federation: one site holds all training images, also those that a partition leaves out."""

from fednca.methods.base import About
from fednca.methods.fedavg import FedAvg


class Centralized(FedAvg):
    """All training images in one place, one optimiser for all rounds: what federated methods are compared with."""

    centralized = True
    about = About(
        paper="no federation",
        formula="w ← argmin_w Σ_i BCE(x_i, y_i; w)",
        state="optimiser",
        aggregation="none",
    )


METHOD = Centralized
