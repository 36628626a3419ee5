"""The top of the page against numpy's and scipy's arithmetic on the records."""

import numpy as np
import pytest
from plan import Entry, chosen_draw, eventual_runs
from reading import SETTING, metric, shows, tables
from scipy import stats

from fednca.report.published import published


def found(text):
    """The rows of the table by setting and method."""
    header, rows = tables(text, "## In short")[0]
    assert [name for name in header if name != "published"][2:] == [
        *("macro-F1 at 0.5", "macro-F1 cal.", "lost by calibrating", "macro-AUC", "rests on")
    ]
    return {(row[0], row[1]): row[2:] for row in rows}


def pairs(records, row, name):
    """The differences to FedAvg by draw: three seeds of the draw taken, one of the others."""
    taken = chosen_draw(SETTING, records)
    by_draw = {}
    for draw in range(5):
        seeds = range(3) if draw == taken else [0]
        both = [[records[Entry(SETTING, each, draw, seed).path] for each in (row, "fedavg")] for seed in seeds]
        by_draw[draw] = np.mean([metric(own, name) - metric(base, name) for own, base in both])
    return np.array(list(by_draw.values()))


def with_interval(values):
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return [values.mean(), interval.low, interval.high]


@pytest.mark.parametrize("row", ["fednca-ml", "fednca-ml:variant=released"])
def test_gains_are_those_over_draws_beside_the_published_ones(whole, complete, row):
    half, said_f1, calibrated, lost, auc, said_auc, rests = found(whole[0])[SETTING, row]
    at_half, at_own = pairs(complete, row, "macro-F1"), pairs(complete, row, "macro-F1 cal.")
    shows(half, with_interval(at_half))
    shows(calibrated, with_interval(at_own))
    shows(lost, with_interval(at_half - at_own))
    shows(auc, with_interval(pairs(complete, row, "macro-AUC")))
    for said, name in ((said_f1, "macro_f1"), (said_auc, "macro_auc")):
        shows(said, [published("dermamnist", 0.1, "fednca-ml", name) - published("dermamnist", 0.1, "fedavg", name)])
    assert rests == "5 draws, 7 pairs"


def test_the_number_of_runs_is_that_of_a_plan_worked_off(whole, complete):
    assert eventual_runs() == len(complete)
    assert f"\n{len(complete)} of {len(complete)} runs are done" in whole[0]
    assert f"{SETTING} 27 of 27, " in whole[0]
