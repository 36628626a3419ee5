"""Training without a federation: one site holds all training images, also those that a partition leaves out."""

from typing import ClassVar

from fednca.methods.contract import About, Method, Rule
from fednca.methods.fedavg import LinearLearner


class Centralized(Rule):
    """All training images in one place, and one optimiser that keeps its state over all rounds."""

    centralized: ClassVar[bool] = True


METHOD = Method(
    "centralized",
    About(
        summary="All training images in one place, one optimiser for all rounds: what federations are compared with.",
        paper="no federation",
        formula="w ← argmin_w Σ_i BCE(x_i, y_i; w)",
        state="optimiser",
        aggregation="none",
    ),
    LinearLearner(),
    Centralized(),
)
