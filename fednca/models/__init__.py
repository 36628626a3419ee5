"""Models: a timm backbone makes a feature map of an image, and a head turns the map into one logit per class.

Two terms recur. The ETF (simplex equiangular tight frame) is a set of fixed class vectors that are as far apart as
possible. LADM (label-aware disentanglement) is attention that reads one feature per class from the map.
"""

from fednca.models.cosine import CosineHead, SphereHead
from fednca.models.encoder import Backbone, build_backbone
from fednca.models.etf import orthonormal_rows, simplex_etf
from fednca.models.evidence import attention_maps, grad_cam
from fednca.models.heads import (
    Classifier,
    ETFHead,
    Head,
    LADMHead,
    LinearHead,
    MLPHead,
    Output,
    constants_of,
    load_constants,
)
from fednca.models.ladm import LADM, sincos_table
from fednca.models.text import text_table
from fednca.models.tokens import DecoderHead, LabelTransformerHead

__all__ = [
    "LADM", "Backbone", "Classifier", "CosineHead", "DecoderHead", "ETFHead", "Head", "LADMHead",
    "LabelTransformerHead", "LinearHead", "MLPHead", "Output", "SphereHead", "attention_maps", "build_backbone",
    "constants_of", "grad_cam", "load_constants", "orthonormal_rows", "simplex_etf", "sincos_table", "text_table",
]  # fmt: skip
