"""Models: a timm backbone, the simplex ETF, label-aware attention, and the heads that join them."""

from fednca.models.encoder import Backbone, build_backbone
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
