"""The numbers on digits of the page of results, against numpy and scipy."""

import numpy as np
import pytest
from plan import CANDIDATES, GRID, Entry
from reading import column, level, metric, shows, tables
from scipy import stats

ON_DIGITS = (
    "fednca-ml",
    "fednca-ml:variant=released",
    "fednca-ml:lambda1=0,lambda2=0",
    "ml-decoder",
    "fedavg-balanced",
    "fedavg:head=mlp",
)


def test_gains_on_digits_are_those_of_scipy(whole, complete):
    for name in ("macro-F1", "macro-F1 cal."):
        header, rows = tables(whole[0], f"### {name}, digits")[0]
        assert header == ["gamma", "beta", "fedavg", *ON_DIGITS]
        assert [row[:2] for row in rows] == [[g, b] for g in ("0.3", "0.5", "1.0") for b in ("0.1", "5.0")]
        for gamma, beta, own, *cells in rows:
            setting = f"digits-{beta}-{gamma}"
            base = [metric(complete[Entry(setting, "fedavg", draw, 0, 50).path], name) for draw in range(3)]
            shows(own, [np.mean(base)])
            for row, cell in zip(ON_DIGITS, cells, strict=True):
                found = [metric(complete[Entry(setting, row, draw, 0, 50).path], name) for draw in range(3)]
                low, high = stats.ttest_rel(found, base).confidence_interval(0.95)
                shows(cell, [np.mean(found) - np.mean(base), low, high])
                assert cell.endswith("better" if low > 0 else "worse" if high < 0 else "equal")


def test_heads_on_digits_are_compared_with_fednca_ml(whole, complete):
    header, rows = tables(whole[0], "### macro-F1 cal., digits")[3]
    assert header == ["gamma", "beta", *(row for row in ON_DIGITS if row != "fedavg-balanced")]
    pairs = [[complete[Entry("digits-0.1-0.3", header[at], draw, 0, 50).path] for at in (2, -1)] for draw in range(3)]
    base, own = zip(*([metric(record, "macro-F1 cal.") for record in pair] for pair in pairs), strict=True)
    shows(rows[0][2], [np.mean(base)])
    gap = np.mean(own) - np.mean(base)
    shows(rows[0][-1], [gap, *stats.ttest_rel(own, base).confidence_interval(0.95)])


def test_ranks_of_gains_on_digits_are_those_of_scipy(whole, complete):
    ranks = tables(whole[0], "### macro-F1 cal., digits")[4][1]
    assert [row[:2] for row in ranks[:2]] == [["fednca-ml", "macro-F1"], ["fednca-ml", "macro-F1 cal."]]
    for row, name, label_distance, *_, drawn in ranks:
        places = [(setting, draw) for setting in GRID for draw in range(3)]
        pairs = [[complete[Entry(s, each, draw, 0, 50).path] for each in (row, "fedavg")] for s, draw in places]
        gained = [metric(own, name) - metric(base, name) for own, base in pairs]
        distances = [base["partition"]["label_distance"] for _, base in pairs]
        assert float(label_distance) == pytest.approx(stats.spearmanr(distances, gained).statistic, abs=0.00501)
        assert drawn == "18"


def test_learning_rates_tried_on_digits_stand_in_their_order(whole, complete):
    header, rows = tables(whole[0], "### macro-F1 cal., digits")[-1]
    assert header == ["learning rate", "val. macro-F1", "macro-F1", "macro-F1 cal.", "macro-AUC"]
    assert [row[0] for row in rows] == ["0.0005", "0.001", "0.002", "0.005", "0.01"]
    chosen = complete[Entry("digits-0.1-0.5", "fedavg", 0, 0, 50).path]
    assert rows[3][1] == f"{100 * chosen['results']['val']['val']['macro_f1']:.1f}"
    for cell, name in zip(rows[3][2:], header[2:], strict=True):
        shows(cell, [metric(chosen, name)])


def test_longer_runs_on_digits_are_those_of_scipy(whole, complete):
    header, rows = tables(whole[0], "### More rounds, digits")[0]
    marks = [int(name) for name in header[4:]]
    assert marks == [20, 50, 100, 150, 200]
    assert len(rows) == 4 * 2 * 2
    for gamma, beta, name, what, *cells in rows:
        for mark, cell in zip(marks, cells, strict=True):
            own, base = (
                [
                    level(complete[Entry(f"digits-{beta}-{gamma}", row, draw, 0, 200).path], name, mark)
                    for draw in range(3)
                ]
                for row in ("fednca-ml", "fedavg")
            )
            if what == "fedavg":
                shows(cell, [np.mean(base)])
            else:
                low, high = stats.ttest_rel(own, base).confidence_interval(0.95)
                shows(cell, [np.mean(own) - np.mean(base), low, high])


def test_candidates_on_digits_are_compared_by_their_validation_metrics(whole, complete):
    for name in ("macro-F1", "macro-AUC"):
        header, rows = tables(whole[0], f"### {name} of validation, digits: candidates")[0]
        assert header == ["gamma", "beta", "fednca-ml", *CANDIDATES]
        assert [row[:2] for row in rows] == [[g, b] for g in ("0.3", "0.5") for b in ("0.1", "5.0")]
        for gamma, beta, own, *cells in rows:
            base, *others = (
                [
                    complete[Entry(f"digits-{beta}-{gamma}", row, draw, 0, 50).path]["results"]["val"]["val"]
                    for draw in range(3)
                ]
                for row in header[2:]
            )
            full = [100 * each[column(name)] for each in base]
            shows(own, [np.mean(full)])
            for cell, other in zip(cells, others, strict=True):
                found = [100 * each[column(name)] for each in other]
                low, high = stats.ttest_rel(found, full).confidence_interval(0.95)
                shows(cell, [np.mean(found) - np.mean(full), low, high])
