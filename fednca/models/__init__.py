"""Models: a timm backbone makes a feature map of an image, and a head turns the map into one logit per class.

Two terms recur. The ETF (simplex equiangular tight frame) is a set of fixed class vectors that are as far apart as
possible. LADM (label-aware disentanglement) is attention that reads one feature per class from the map.
"""

from fednca.models.backbone import Backbone, build_backbone
from fednca.models.etf import simplex_etf
from fednca.models.heads import Classifier, ETFHead, LADMHead, LinearHead, MLPHead, Output
from fednca.models.ladm import LADM, sincos_table

__all__ = [
    "LADM",
    "Backbone",
    "Classifier",
    "ETFHead",
    "LADMHead",
    "LinearHead",
    "MLPHead",
    "Output",
    "build_backbone",
    "simplex_etf",
    "sincos_table",
]
