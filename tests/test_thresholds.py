"""Thresholds from histograms against choosing them on the pooled scores with scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, precision_recall_curve, recall_score

from fednca.config import CalibrateConfig
from fednca.measures.thresholds import pick_thresholds, score_histograms

FINE = 100_000


def scores(seed=0, clients=4, classes=5):
    rng = np.random.default_rng(seed)
    parts = []
    for size in rng.integers(5, 80, clients):
        labels = (rng.random((size, classes)) < 0.3).astype(np.int8)
        logits = rng.normal(size=(size, classes)) + 1.5 * labels - 1
        parts.append((torch.from_numpy(1 / (1 + np.exp(-logits))).float(), torch.from_numpy(labels)))
    return parts


def calibrate(parts, **settings):
    config = CalibrateConfig(**settings)
    return pick_thresholds(sum(score_histograms(p, y, config) for p, y in parts), config).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_with_fine_bins_f1_is_the_best_on_the_pooled_scores(seed):
    parts = scores(seed)
    thresholds = calibrate(parts, bins=FINE)
    p, y = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    for c, threshold in enumerate(thresholds):
        precision, recall, _ = precision_recall_curve(y[:, c], p[:, c])
        best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
        assert f1_score(y[:, c], p[:, c] > threshold) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("target", [0.5, 0.9, 1.0])
def test_sensitivity_and_specificity_are_reached_and_not_given_away(target):
    parts = scores(1)
    p, y = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
    step = 1 / FINE
    for c in range(5):
        threshold = calibrate(parts, bins=FINE, goal="sensitivity", target=target)[c]
        assert recall_score(y[:, c], p[:, c] > threshold) >= target
        assert recall_score(y[:, c], p[:, c] > threshold + step) < target
        threshold = calibrate(parts, bins=FINE, goal="specificity", target=target)[c]
        assert recall_score(1 - y[:, c], p[:, c] <= threshold) >= target
        assert recall_score(1 - y[:, c], p[:, c] <= threshold - step) < target


def test_histograms_are_counts_by_label_class_and_bin():
    p = torch.tensor([[0.0, 1.0], [0.25, 0.3], [0.26, 0.5], [0.9, 0.0]])
    y = torch.tensor([[0, 1], [1, 1], [1, -1], [0, 0]])
    found = score_histograms(p, y, CalibrateConfig(bins=4))  # candidates 0, 0.25, 0.5, 0.75
    naive = torch.zeros(2, 2, 5, dtype=torch.int64)
    for i in range(4):
        for c in range(2):
            if y[i, c] >= 0:
                naive[y[i, c], c, sum(float(p[i, c]) > t for t in (0, 0.25, 0.5, 0.75))] += 1
    assert torch.equal(found, naive)
    assert torch.equal(score_histograms(p, y, CalibrateConfig(bins=4, min_count=2)), naive.where(naive >= 2, 0))


@pytest.mark.parametrize("goal", ["f1", "sensitivity", "specificity"])
def test_a_class_with_nothing_to_choose_by_keeps_one_half(goal):
    for label in (0, 1):
        assert calibrate([(torch.rand(20, 1), torch.full((20, 1), label))], goal=goal) == [0.5]


def test_a_target_that_is_met_exactly_counts_as_met():
    p = torch.cat([torch.arange(10) / 10 + 0.045, torch.tensor([0.99])])[:, None]
    y = torch.tensor([0] * 10 + [1])[:, None]  # one false positive in ten is a specificity of 0.9
    assert calibrate([(p, y)], bins=100, goal="specificity", target=0.9) == [pytest.approx(0.85)]


def test_between_equally_good_thresholds_the_one_nearest_to_one_half():
    p, y = torch.tensor([[0.1], [0.9]]), torch.tensor([[0], [1]])
    assert calibrate([(p, y)], bins=10) == [0.5]
    assert calibrate([(p / 4, y)], bins=1000) == [pytest.approx(0.224)]


def thresholds(probabilities, labels, **settings):
    config = CalibrateConfig(**settings)
    pair = torch.tensor(probabilities, dtype=torch.float64)[:, None], torch.tensor(labels)[:, None]
    return pick_thresholds(score_histograms(*pair, config), config).tolist()


def test_a_bin_with_just_enough_images_is_sent():
    config = CalibrateConfig(bins=2, min_count=2)
    found = score_histograms(torch.tensor([[0.1], [0.1], [0.9]]), torch.tensor([[0], [0], [1]]), config)
    assert found.sum() == 2


def test_a_sensitivity_that_is_met_exactly_is_met():
    assert 0.28 * 25 > 7  # by rounding
    places = [(place + 0.5) / 25 for place in range(25)]
    assert thresholds([*places, 0.01], [1] * 25 + [0], bins=25, goal="sensitivity", target=0.28) == [
        pytest.approx(0.72)
    ]


def test_a_goal_that_no_threshold_reaches_gives_the_nearest_one():
    assert thresholds([1.0, 0.0], [0, 1], bins=10, goal="specificity", target=1.0) == [pytest.approx(0.9)]
    assert thresholds([1.0, 0.0], [0, 1], bins=10, goal="sensitivity", target=1.0) == [0.0]
