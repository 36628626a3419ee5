"""What the figures show, against the records that they are drawn from."""

import copy

import numpy as np
import pytest
from figures import curves, draw_all
from plan import COMPONENTS, TABLE, Entry, chosen_draw
from study import Study
from swings import later_mean

SETTING = "cifar10-0.5"


@pytest.fixture(scope="module")
def figures(complete):
    return draw_all(Study(complete))


def on_chosen_draw(records, row):
    draw = chosen_draw(SETTING, records)
    return [records[Entry(SETTING, row, draw, seed).path] for seed in range(3)]


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_curves_are_means_and_bands_reach_from_lowest_to_highest(figures, complete):
    figure = figures[f"curves-{SETTING}"]
    panels = (("val", "macro_f1"), ("test", "macro_f1_calibrated"), ("test", "macro_auc"))
    for axes, (split, metric) in zip(figure.axes, panels, strict=True):
        assert len(axes.lines) == len(axes.collections) == len(TABLE)
        for row, line, band in zip(TABLE, axes.lines, axes.collections, strict=True):
            values = 100 * np.array([record["curves"][split][metric] for record in on_chosen_draw(complete, row)])
            np.testing.assert_allclose(line.get_ydata(), values.mean(axis=0))
            heights = band.get_paths()[0].vertices[:, 1]
            assert (heights.min(), heights.max()) == pytest.approx((values.min(), values.max()))
    assert labels(figure)[:2] == ["fedavg (3 seeds)", "fednca-ml (3 seeds)"]
    assert len({line.get_color() for line in figure.axes[0].lines}) == len(TABLE)


def test_curves_that_some_runs_did_not_keep_are_left_out(complete):
    older = copy.deepcopy(on_chosen_draw(complete, "fedavg"))
    del older[1]["curves"]["test"]["macro_f1_calibrated"]
    figure = curves(SETTING, {"fedavg": older, "fedprox": on_chosen_draw(complete, "fedprox")})
    assert [axes.get_title().partition(": ")[2] for axes in figure.axes] == ["validation macro-F1", "test macro-AUC"]
    assert later_mean(older, "macro_f1_calibrated") is None
    assert later_mean(older[2:], "macro_f1_calibrated") is not None


def test_gains_stand_over_the_skew_of_their_draw_and_what_calibrating_does_for_fedavg(figures, complete):
    figure = figures["gains"]
    assert len(figure.axes) == 2 * 4
    draw = chosen_draw(SETTING, complete)
    pairs = [[complete[Entry(SETTING, row, draw, seed).path] for row in ("spherefed", "fedavg")] for seed in range(3)]
    partition, base = pairs[0][1]["partition"], [pair[1]["results"]["val"] for pair in pairs]
    lifts = [100 * (own["calibrated"]["test"]["macro_f1"] - own["test"]["macro_f1"]) for own in base]
    skews = [partition[name] for name in ("label_distance", "missing_classes", "cooccurrence_distance")]
    for place, axes in enumerate(figure.axes):
        drawn = np.concatenate([points.get_offsets() for points in axes.collections])
        results = [[record["results"]["val"] for record in pair] for pair in pairs]
        if place >= 4:
            results = [[result["calibrated"] for result in pair] for pair in results]
        gain = np.mean([100 * (a["test"]["macro_f1"] - b["test"]["macro_f1"]) for a, b in results])
        expected = [[*skews, np.mean(lifts)][place % 4], gain]
        assert np.isclose(drawn, expected).all(axis=1).sum() == 1


def test_maps_show_every_point_with_its_silhouettes(figures, complete):
    figure = figures[f"features-{SETTING}"]
    for place, name in enumerate(("FC", "LADM + ETF", "all")):
        features = on_chosen_draw(complete, COMPONENTS[name])[0]["features"]
        upper, lower = figure.axes[place], figure.axes[3 + place]
        for axes, groups in ((upper, features["classes"]), (lower, features["label_counts"])):
            (points,) = axes.collections
            np.testing.assert_allclose(points.get_offsets(), features["places"])
            colours = [tuple(colour) for colour in points.get_facecolors()]
            assert len(set(zip(colours, groups, strict=True))) == len(set(groups)) == len(set(colours))
        scores = features["silhouette"]
        assert f"{name}\nsilhouette by class {scores['class']:.2f}" in upper.get_title(loc="left")
        assert lower.get_title(loc="left").endswith(f"{scores['label count']:.2f}")


def test_cosines_are_shown_with_the_ideal_of_a_simplex(figures, complete):
    figure = figures[f"cosines-{SETTING}"]
    for axes, name in zip(figure.axes, ("FC", "LADM + ETF", "all"), strict=False):
        cosines = on_chosen_draw(complete, COMPONENTS[name])[0]["features"]["mean_cosines"]
        np.testing.assert_allclose(axes.collections[0].get_array(), cosines)
    assert f"{-1 / 9:.2f}" in figure.axes[3].get_ylabel()


def test_a_component_without_features_says_so(complete):
    path = Entry(SETTING, COMPONENTS["LADM + ETF"], chosen_draw(SETTING, complete), 0).path
    records = {key: record for key, record in complete.items() if key != path}
    panels = draw_all(Study(records))[f"features-{SETTING}"].axes
    assert [axes.get_title(loc="left").endswith("not run") for axes in panels[:3]] == [False, True, False]


@pytest.mark.parametrize("missing", ["FC", "LADM + ETF"])
def test_the_classes_are_named_at_the_leftmost_cosines(complete, missing):
    path = Entry(SETTING, COMPONENTS[missing], chosen_draw(SETTING, complete), 0).path
    records = {key: record for key, record in complete.items() if key != path}
    panels = draw_all(Study(records))[f"cosines-{SETTING}"].axes[:3]
    named = [[label.get_text() for label in axes.get_yticklabels()] for axes in panels if axes.axison]
    assert named == [[f"class {c}" for c in range(10)], [""] * 10]


def test_nothing_is_drawn_without_records(tried_draws):
    assert draw_all(Study({})) == draw_all(Study(tried_draws)) == {}
