"""Losses, metrics, thresholds, neural collapse, the Fisher diagonal: functions of tensors."""

from fednca.measures.collapse import measure_collapse
from fednca.measures.fisher import fisher_sums
from fednca.measures.histograms import judge_histograms, metrics_of
from fednca.measures.losses import (
    asymmetric,
    balanced_bce,
    bce,
    bce_sum,
    negative_rejection,
    negative_rejection_released,
    objective,
    objective_released,
    positive_contrast,
    positive_contrast_released,
)
from fednca.measures.metrics import Metrics, at_thresholds, multilabel_metrics
from fednca.measures.thresholds import pick_thresholds, score_histograms

__all__ = [
    "Metrics", "asymmetric", "at_thresholds", "balanced_bce", "bce", "bce_sum", "fisher_sums", "judge_histograms",
    "measure_collapse", "metrics_of", "multilabel_metrics", "negative_rejection", "negative_rejection_released",
    "objective", "objective_released", "pick_thresholds", "positive_contrast", "positive_contrast_released",
    "score_histograms",
]  # fmt: skip
