from dataclasses import astuple

import numpy as np
import pytest
import torch
from scipy import stats

import fednca.use.bootstrap
from fednca.base.randomness import numpy_rng
from fednca.measures.metrics import multilabel_metrics
from fednca.use.bootstrap import Resampler, Resampling, Scored, draw_weights, intervals, units_of

N, C = 60, 4


def join(metrics):
    """Put all numbers of a Metrics in a row."""
    return np.hstack([np.atleast_1d(np.array(value)) for value in astuple(metrics)])


@pytest.fixture
def scored():
    """Scores with many ties, unknown labels, a class without positives and a class without negatives in places."""
    rng = np.random.default_rng(3)
    labels = (rng.random((N, C)) < [0.5, 0.1, 0.02, 0.9]).astype(np.int8)
    labels[rng.random((N, C)) < 0.2] = -1
    labels[:, 2] = np.minimum(labels[:, 2], 0)
    labels[5, 2] = 1  # one positive only: most resamples lack it or repeat it
    probabilities = np.round(rng.random((N, C)), 1)
    return Scored(probabilities, labels, np.array([0.5, 0.3, 0.7, 0.2]))


def judge(scored, rows):
    parts = (scored.probabilities[rows], scored.labels[rows], scored.thresholds)
    return join(multilabel_metrics(*map(torch.from_numpy, parts)))


def test_counting_draws_is_judging_the_images_drawn(scored):
    rng = np.random.default_rng(0)
    draws = [rng.integers(N, size=N) for _ in range(40)]
    weights = np.stack([np.bincount(rows, minlength=N) for rows in draws]).astype(float)
    expected = np.stack([judge(scored, rows) for rows in draws])
    np.testing.assert_allclose(Resampler(scored)(weights), expected, rtol=0, atol=1e-12)
    assert np.isnan(expected).any()
    assert not np.isnan(expected).all(axis=0).any()


def test_intervals_are_those_of_scipy(scored):
    sound = Scored(scored.probabilities[:, [0, 3]], np.maximum(scored.labels[:, [0, 3]], 0), scored.thresholds[[0, 3]])
    how = Resampling(resamples=200, confidence=0.9, seed=7)
    low, high = intervals(sound, how)
    for number in (0, 1, 2, 3, 4, 6, 8, 10):
        found = stats.bootstrap(
            (np.arange(N),),
            lambda rows, n=number: judge(sound, rows)[n],
            vectorized=False,
            batch=1,
            n_resamples=how.resamples,
            confidence_level=how.confidence,
            method="percentile",
            rng=numpy_rng(how.seed, "bootstrap"),
        ).confidence_interval
        assert (join(low)[number], join(high)[number]) == pytest.approx(tuple(found), rel=0, abs=1e-12)


def test_groups_are_drawn_whole(scored):
    groups = np.arange(N) // 7 * 10  # nine groups, numbered with gaps
    grouped = Scored(scored.probabilities, scored.labels, scored.thresholds, groups)
    how = Resampling(resamples=50, seed=1)
    rng = numpy_rng(how.seed, "bootstrap")
    values = []
    for _ in range(how.resamples):
        chosen = rng.integers(9, size=9)
        values.append(judge(scored, np.concatenate([np.flatnonzero(groups == 10 * g) for g in chosen])))
    expected = np.nanpercentile(np.stack(values), [2.5, 97.5], axis=0)
    low, high = intervals(grouped, how)
    np.testing.assert_allclose([join(low), join(high)], expected, rtol=0, atol=1e-12)


def test_a_class_without_positives_has_no_interval(scored):
    scored.labels[:, 1] = 0
    low, high = intervals(scored, Resampling(resamples=5))
    for metrics in (low, high):
        assert np.isnan([metrics.class_auc[1], metrics.class_f1[1], metrics.class_ap[1]]).all()
        assert metrics.as_dict()["class_auc"][1] is None


def test_resamples_in_blocks_are_the_same(scored, monkeypatch):
    how = Resampling(resamples=11)
    whole = intervals(scored, how)
    monkeypatch.setattr(fednca.use.bootstrap, "BLOCK", 3 * N * C)
    np.testing.assert_array_equal(join(intervals(scored, how)[0]), join(whole[0]))


def test_every_resample_has_as_many_units(scored):
    weights = draw_weights(np.random.default_rng(0), units_of(scored), 8)
    assert weights.sum(axis=1).tolist() == [N] * 8
