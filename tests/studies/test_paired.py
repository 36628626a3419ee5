"""Paired differences and their intervals, against scipy's t-test."""

import numpy as np
import pytest
from paired import differences, over_draws, over_seeds, pooled, t_interval
from plan import Entry
from scipy import stats
from study import Study


def reference(values):
    """The interval that scipy gives."""
    found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return found.low, found.high


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [-3.0, 0.5], [0.1, 0.2, -0.4, 8.0, 2.5]])
def test_the_interval_is_scipys(values):
    found = t_interval(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.low, found.high) == pytest.approx(reference(values))
    assert found.count == len(values)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([4.0, 5.0, 6.0], "better"),
        ([-4.0, -5.0, -6.0], "worse"),
        ([-1.0, 1.0, 2.0], "equal"),
        ([0.5, 5.0, 6.0], "equal"),  # a mean far above zero, and an interval that contains it
        ([9.0], "undecided"),
        ([8.9999, 9.0001], "undecided"),
    ],
)
def test_a_verdict_needs_three_values_and_an_interval_without_zero(values, verdict):
    assert t_interval(values).verdict == verdict
    if len(values) > 2:
        significant = stats.ttest_1samp(values, 0).pvalue < 0.05
        assert significant == (verdict in {"better", "worse"})


def test_draws_are_the_unit_where_there_are_several():
    pairs = {(2, 0): 1.0, (2, 1): 2.0, (2, 2): 6.0, (0, 0): 5.0, (1, 0): 7.0}
    found = pooled(pairs)
    assert (found.low, found.high) == pytest.approx(reference([3.0, 5.0, 7.0]))
    assert found.count == 3
    seeds, drawn = over_seeds(pairs, 2), over_draws(pairs, 0)
    assert (seeds.low, seeds.high) == pytest.approx(reference([1.0, 2.0, 6.0]))
    assert (drawn.low, drawn.high) == pytest.approx(reference([1.0, 5.0, 7.0]))


def test_one_draw_alone_gives_the_interval_over_its_seeds():
    found = pooled({(2, 0): 1.0, (2, 1): 2.0, (2, 2): 6.0})
    assert (found.low, found.high) == pytest.approx(reference([1.0, 2.0, 6.0]))
    assert pooled({}) is over_seeds({}, 2) is over_draws({}, 0) is None


def test_differences_are_taken_on_the_same_draw_with_the_same_seed(invent):
    entries = [Entry("cifar10-0.1", "fedavg", draw, seed) for draw, seed in ((0, 0), (0, 1), (3, 0))]
    entries += [Entry("cifar10-0.1", "fednca-ml", draw, seed) for draw, seed in ((0, 1), (3, 0), (4, 0))]
    records = {entry.path: invent(entry) for entry in entries}

    def calibrated(row, draw, seed):
        record = records[Entry("cifar10-0.1", row, draw, seed).path]
        return 100 * record["results"]["val"]["calibrated"]["test"]["macro_f1"]

    found = differences(Study(records), "cifar10-0.1", "fednca-ml", "fedavg", "macro_f1_calibrated")
    assert found.keys() == {(0, 1), (3, 0)}
    for place, value in found.items():
        assert value == pytest.approx(calibrated("fednca-ml", *place) - calibrated("fedavg", *place))
