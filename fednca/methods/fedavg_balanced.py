"""FedAvg on class-balanced BCE: positives and negatives weigh the same, however rare the positives are."""

from fednca.losses import balanced_bce
from fednca.methods.base import About
from fednca.methods.fedavg import FedAvg


class FedAvgBalanced(FedAvg):
    """FedAvg with a BCE in which positives and negatives weigh the same, however rare the positives are."""

    about = About(
        paper="McMahan et al., 2017",
        objective="class-balanced BCE",
        formula="L = ½·mean_{y=1} -log σ(a) + ½·mean_{y=0} -log(1 - σ(a)); w ← Σ_k w_k / K",
    )
    criterion = staticmethod(balanced_bce)


METHOD = FedAvgBalanced
