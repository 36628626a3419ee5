"""The numbers of the page of results, against numpy and scipy."""

import copy

import numpy as np
import pytest
from by_class import which_classes
from comparisons import against_fedavg
from plan import CANDIDATES, COMPONENTS, DRAWS, SETTINGS, TABLE, Entry, chosen_draw, strongest_other
from reading import SETTING, by_name, column, curve_of, level, metric, plain, runs, shows, tables
from scipy import stats
from seed_tables import published_ablations
from study import Study
from swings import above_neighbours, step

from fednca.report.published import published

RELEASED = "fednca-ml:variant=released"


def test_main_tables_hold_means_deviations_and_published_values(whole, complete):
    for setting in SETTINGS:
        *found, _ = tables(whole[0], f"### {setting}")
        assert len(found) == 3  # val, paper, last
        for select, table in zip(("val", "paper", "last"), found, strict=True):
            assert any(name.endswith("cal.") for name in table[0]) == (select != "paper")
            for row, cells in by_name(table).items():
                for name, cell in cells.items():
                    if name == "seeds":
                        assert cell == "3"
                    else:
                        check_cell(cell, name, select, setting, row, complete)


def check_cell(cell, name, select, setting, row, records):
    values = [metric(record, name, select) for record in runs(records, row, setting)]
    dataset, _, beta = setting.rpartition("-")
    known = published(dataset, float(beta), row.partition(":")[0], column(name)) if "cal." not in name else None
    mean, std = np.mean(values), np.std(values, ddof=1)
    assert "±" in cell
    shows(cell, [mean, std] if known is None else [mean, std, known, mean - known])


@pytest.mark.parametrize("setting", [SETTING, "nih-sample-0.1"])
def test_every_federated_row_is_compared_over_seeds(whole, complete, setting):
    _, rows = tables(whole[0], f"### {setting}")[-1]
    others = [row for row in TABLE if row not in {"fedavg", "fednca-ml", "centralized"}]
    compared = {tuple(names.split(" − ")): cells for names, *cells in rows}
    assert {(row, "fedavg") for row in (*others, "fednca-ml")} <= set(compared)
    assert {("fednca-ml", row) for row in others if "released" not in row} <= set(compared)
    for pair, cells in compared.items():
        for name, cell in zip(("macro-F1", "macro-F1 cal.", "macro-AUC"), cells, strict=True):
            own, base = ([metric(record, name) for record in runs(complete, row, setting)] for row in pair)
            low, high = stats.ttest_rel(own, base).confidence_interval(0.95)
            shows(cell, [np.mean(own) - np.mean(base), low, high])


def test_the_best_federated_row_is_bold_and_the_second_underlined(whole, complete):
    table = by_name(tables(whole[0], f"### {SETTING}")[0])
    federated = [row for row in TABLE if row != "centralized"]
    for name in ("macro-AUC", "micro-F1", "macro-F1 cal."):
        means = [round(np.mean([metric(r, name) for r in runs(complete, row)]), 1) for row in federated]
        first, second = sorted(set(means), reverse=True)[:2]
        for row, mean in zip(federated, means, strict=True):
            assert table[row][name].startswith("**") == (mean == first)
            assert table[row][name].startswith("<u>") == (mean == second)
        assert table["centralized"][name] == plain(table["centralized"][name])


def test_paired_differences_are_those_of_scipy(whole, complete):
    (_, rows), *details = tables(whole[0], "## FedNCA-ML against FedAvg")
    assert len(details) == len(SETTINGS)
    assert len(rows) == len(SETTINGS) * 6
    for setting, names, *cells, drawn, pairs in rows:
        row, base = names.split(" − ")
        assert (drawn, pairs) == ("5", "7")
        for name, cell in zip(("macro-F1", "macro-F1 cal.", "macro-AUC"), cells, strict=True):
            means = []
            for draw in DRAWS:
                keys = [(Entry(setting, row, draw, s).path, Entry(setting, base, draw, s).path) for s in range(3)]
                gaps = [
                    metric(complete[a], name) - metric(complete[b], name) for a, b in keys if {a, b} <= set(complete)
                ]
                means += [np.mean(gaps)] if gaps else []
            low, high = stats.ttest_1samp(means, 0).confidence_interval(0.95)
            word = "better" if low > 0 else "worse" if high < 0 else "equal"
            shows(cell, [np.mean(means), low, high])
            assert cell.endswith(f"] {word}")


def test_leads_by_round_are_those_of_scipy(whole, complete):
    header, rows = tables(whole[0], "### Sooner, or better?")[0]
    assert len(rows) == len(SETTINGS) * 3 * 2
    marks = [int(name) for name in header[3:-1]]
    assert marks == [20, 40, 60, 80, 100]
    for setting, row, name, *cells, counted in rows:
        pairs = {
            (draw, seed): [complete.get(Entry(setting, each, draw, seed).path) for each in (row, "fedavg")]
            for draw in DRAWS
            for seed in range(3)
        }
        for mark, cell in zip(marks, cells, strict=True):
            gaps = {p: level(o, name, mark) - level(b, name, mark) for p, (o, b) in pairs.items() if o and b}
            drawn = {draw for draw, _ in gaps}
            means = [np.mean([gap for place, gap in gaps.items() if place[0] == draw]) for draw in sorted(drawn)]
            means = means if len(drawn) > 1 else list(gaps.values())
            low, high = stats.ttest_1samp(means, 0).confidence_interval(0.95)
            shows(cell, [np.mean(means), low, high])
            assert cell.startswith("**") == (low > 0 or high < 0)
            assert counted.startswith(f"{len(drawn)} draw")


@pytest.mark.parametrize(("gain", "verdict"), [(5.0, "better"), (0.0, "equal"), (-5.0, "worse")])
def test_verdicts_of_constructed_gains(complete, gain, verdict):
    records = dict(complete)
    for path, record in complete.items():
        if record["row"] == "fednca-ml" and record["setting"] in SETTINGS:
            base = complete.get(Entry(record["setting"], "fedavg", record["draw"], record["seed"]).path)
            records[path] = copy.deepcopy(record)
            # A gain that moves a little from draw to draw and seed to seed, around its mean.
            moved = gain + 0.3 * (record["draw"] - 2) + 0.1 * (record["seed"] - 1)
            value = base["results"]["val"]["test"]["macro_f1"] + moved / 100
            records[path]["results"]["val"]["test"]["macro_f1"] = value
    rows = tables("\n" + against_fedavg(Study(records)), "## FedNCA-ML against FedAvg")[0][1]
    words = [row[2].split()[-1] for row in rows if row[1] == "fednca-ml − fedavg"]
    assert words == [verdict] * len(SETTINGS)


def test_a_verdict_on_one_draw_says_so(complete):
    chosen = {setting: chosen_draw(setting, complete) for setting in SETTINGS}
    short = {path: r for path, r in complete.items() if r["config"]["train"]["rounds"] == 30}
    one = {path: r for path, r in complete.items() if r["draw"] == chosen.get(r["setting"])}
    rows = tables("\n" + against_fedavg(Study(short | one)), "## FedNCA-ML against FedAvg")[0][1]
    for row in rows:
        assert all(cell.endswith("on this draw") for cell in row[2:5])
        assert row[5:] == ["1", "3"]
    two = {path: r for path, r in one.items() if r["seed"] < 2}
    rows = tables("\n" + against_fedavg(Study(short | two)), "## FedNCA-ML against FedAvg")[0][1]
    for row in rows:
        assert all(cell.endswith("on this draw (2 of 3 seeds)") for cell in row[2:5])


def test_spread_over_draws_stands_beside_spread_over_seeds(whole, complete):
    for setting in SETTINGS:
        ((header, rows),) = tables(whole[0], f"### {setting}: several draws")
        chosen = chosen_draw(setting, complete)
        drawn = [int(name.split()[1]) for name in header[2:7]]
        assert drawn[0] == chosen
        assert sorted(drawn) == [0, 1, 2, 3, 4]
        assert header[2] == f"draw {chosen} (taken)"
        assert {row[0] for row in rows} == {*TABLE[:3], strongest_other(setting, chosen, complete)}
        for row, name, *cells in rows:
            values = [metric(complete[Entry(setting, row, draw, 0).path], name) for draw in drawn]
            seeds = [metric(record, name) for record in runs(complete, row, setting)]
            expected = [*values, np.mean(values), np.std(values, ddof=1), np.std(seeds, ddof=1)]
            shows(" ".join(cells), expected)


def test_components_have_published_values_and_f1_by_class(whole, complete):
    metrics, classes, paired = tables(whole[0], f"### {SETTING}: components")
    values = [100 * r["results"]["val"]["test"]["class_f1"][4] for r in runs(complete, COMPONENTS["ETF"])]
    mean, std = np.mean(values), np.std(values, ddof=1)
    shows(by_name(classes)["ETF"]["melanoma"], [mean, std, 0.0, mean])
    full = [metric(record, "macro-F1") for record in runs(complete, "fednca-ml")]
    shows(by_name(metrics)["all"]["macro-F1"], [np.mean(full), np.std(full, ddof=1), 51.38, np.mean(full) - 51.38])
    base = [metric(record, "macro-F1") for record in runs(complete, "fedavg")]
    low, high = stats.ttest_rel(full, base).confidence_interval(0.95)
    shows(by_name(paired)["all − FC"]["macro-F1"], [np.mean(full) - np.mean(base), low, high])


def test_published_ablations_were_copied_well():
    """The mean of the published F1 by class is the published macro-F1, up to the paper's own rounding."""
    rows = [values for key, values in published_ablations().items() if key[:2] == ("components", "dermamnist")]
    assert len(rows) == len(COMPONENTS)
    for values in rows:
        assert np.mean([values[str(c)] for c in range(7)]) == pytest.approx(values["macro_f1"], abs=0.2)


def test_the_draw_taken_is_marked_with_its_numbers(whole, complete):
    for setting in SETTINGS:
        ((header, rows),) = tables(whole[0], f"### {setting}: draws")
        chosen = chosen_draw(setting, complete)
        assert [row[0] for row in rows if "taken" in row[0]] == [f"**{chosen} (taken)**"]
        record = complete[Entry(setting, "fedavg", chosen, 0, 30).path]
        cells = dict(zip(header, map(plain, rows[1 + chosen]), strict=True))
        shows(cells["macro-F1"], [metric(record, "macro-F1")])
        assert cells["label distance"] == f"{record['partition']['label_distance']:.2f}"
        gaps = {row[0]: float(plain(row[5])) for row in rows[1:]}
        assert min(gaps, key=gaps.get) == f"**{chosen} (taken)**"


def test_gains_are_means_of_paired_differences(whole, complete):
    (ranked, correlations), (header, rows) = tables(whole[0], "## When does it help?")
    assert len(rows) == len(SETTINGS) * (7 + 4 * 3)  # all methods on the draw taken, three of them on four more
    setting, row, draw, seeds, label_distance, *_, at_half, calibrated = rows[0]
    places = [(int(draw), seed) for seed in range(int(seeds))]
    pairs = [[complete[Entry(setting, r, *place).path] for r in (row, "fedavg")] for place in places]
    for name, cell in (("macro-F1", at_half), ("macro-F1 cal.", calibrated)):
        shows(cell, [np.mean([metric(a, name) - metric(b, name) for a, b in pairs])])
    assert label_distance == f"{pairs[0][1]['partition']['label_distance']:.2f}"
    assert header[-1] == "macro-F1 cal."
    assert [row[:2] for row in correlations[:2]] == [["fednca-ml", "macro-F1"], ["fednca-ml", "macro-F1 cal."]]
    own = np.array([[float(cell) for cell in cells[4:]] for cells in rows if cells[1] == "fednca-ml"])
    for cells, gained in zip(correlations[:2], (own[:, -2], own[:, -1]), strict=True):
        for measure, cell in zip(own.T[:4], cells[2:6], strict=True):
            assert float(cell) == pytest.approx(stats.spearmanr(measure, gained).statistic, abs=0.03)  # rounded
        assert cells[-1] == str(len(own))
    assert ranked[2:6] == header[4:8]


def test_features_have_silhouettes_and_cosines(whole, complete):
    ((_, rows),) = tables(whole[0], f"### {SETTING}: features")
    draw = chosen_draw(SETTING, complete)
    other = next(each for each in DRAWS if each != draw)
    for at, name, where in ((0, "FC", draw), (3, f"FC, draw {other}", other)):
        features = complete[Entry(SETTING, "fedavg", where, 0).path]["features"]
        raw, centred = (np.array(features[key])[~np.eye(7, dtype=bool)] for key in ("raw_cosines", "mean_cosines"))
        expected = [*features["silhouette"].values(), raw.mean(), np.abs(centred + 1 / 6).mean()]
        assert rows[at] == [name, *(f"{value:.3f}" for value in expected)]


def test_swings_are_mean_distances_in_the_later_half_of_the_rounds(whole, complete):
    (header, rows), _ = tables(whole[0], "### Do runs settle?")
    steps = [(name, apart) for name in ("macro-AUC", "macro-F1") for apart in (1, 2)]
    assert header[2:6] == [f"{name}: {'next round' if apart == 1 else 'the one after'}" for name, apart in steps]
    assert {(setting, row) for setting, row, *_ in rows} == {(setting, row) for setting in SETTINGS for row in TABLE}
    for setting, row, *cells, above, mean, calibrated in rows:
        for (name, apart), cell in zip(steps, cells, strict=True):
            curves = [curve_of(record, name) for record in runs(complete, row, setting)]
            pairs = [abs(curve[i] - curve[i + apart]) for curve in curves for i in range(50, 100 - apart)]
            assert float(cell) == pytest.approx(np.mean(pairs), abs=0.00501)
        shows(above, [np.mean([peak(record) for record in runs(complete, row, setting)])])
        for name, cell in (("macro-F1", mean), ("macro-F1 cal.", calibrated)):
            shows(cell, [np.mean([curve_of(record, name)[50:] for record in runs(complete, row, setting)])])


def test_gains_by_round_are_those_of_scipy(whole, complete):
    _, (_, rows) = tables(whole[0], "### Do runs settle?")
    assert [row[1:3] for row in rows[1:3]] == [["fednca-ml", "macro-F1 cal."], [RELEASED, "macro-F1"]]
    assert len(rows) == 2 * 2 * len(SETTINGS)
    ways = (
        metric,
        lambda record, name: np.mean(curve_of(record, name)[50:]),
        lambda record, name: metric(record, name, "last"),
    )
    for setting, row, name, *cells, _ in rows:
        for way, cell in zip(ways, cells, strict=True):
            pairs = [
                (draw, [complete.get(Entry(setting, each, draw, seed).path) for each in (row, "fedavg")])
                for draw in DRAWS
                for seed in range(3)
            ]
            gaps = [(draw, way(own, name) - way(base, name)) for draw, (own, base) in pairs if own and base]
            means = [np.mean([gap for where, gap in gaps if where == draw]) for draw in DRAWS]
            shows(cell, [np.mean(means), *stats.ttest_1samp(means, 0).confidence_interval(0.95)])


def test_the_class_that_gains_most_has_its_own_f1_and_its_part_of_the_gain(complete):
    records = copy.deepcopy(complete)
    draw = chosen_draw(SETTING, records)
    for row, half, calibrated in (("fedavg", 0.0, 0.25), ("fednca-ml", 0.5, 0.375)):
        for seed in range(3):
            result = records[Entry(SETTING, row, draw, seed).path]["results"]["val"]
            for part, value in ((result, half), (result["calibrated"], calibrated)):
                part["test"]["class_f1"] = [0.75] * 3 + [value] + [0.75] * 3
                part["test"]["class_f1"][seed] += 0.125 * (row == "fedavg")  # of one seed, so that it must be averaged
    _, rows = tables(f"\n{which_classes(Study(records))}", "### Which classes make the gain?")[0]
    assert [row[:3] for row in rows[:5]] == [[SETTING, str(d), "3" if d == draw else "1"] for d in DRAWS]
    gain = 100 * (0.5 - 0.125) / 7
    _, _, _, gained, name, *cells = rows[draw]
    assert name == "class 3"
    shows(" ".join([gained, *cells]), [gain, 50 / 7, 0.0, 50.0, 25.0, 37.5])


def peak(record):
    values, chosen = curve_of(record, "macro-F1"), record["results"]["val"]["round"]
    beside = values[chosen - 2 : chosen - 1] if chosen > 1 else []
    return values[chosen - 1] - np.mean(beside + values[chosen : chosen + 1])


def test_a_run_between_two_states_has_far_steps_and_near_second_steps(complete):
    swinging = copy.deepcopy(complete[Entry(SETTING, "fedavg", chosen_draw(SETTING, complete), 0).path])
    swinging["curves"]["test"]["macro_f1"] = [0.5, 0.52] * 5
    assert (step(swinging, "macro_f1", 1), step(swinging, "macro_f1", 2)) == (pytest.approx(2.0), 0.0)
    for chosen, above in ((1, -2.0), (2, 2.0), (5, -2.0), (10, 2.0)):
        swinging["results"]["val"]["round"] = chosen
        assert above_neighbours(swinging) == pytest.approx(above)


def test_candidates_are_compared_by_their_validation_metrics(whole, complete):
    table, (_, rows) = tables(whole[0], f"### {SETTING}: candidates")
    names = {"macro-F1": "macro_f1", "macro-AUC": "macro_auc"}

    def values(row, name):
        return [100 * record["results"]["val"]["val"][names[name]] for record in runs(complete, row)]

    found = by_name(table)
    assert set(found) == {"fednca-ml", *CANDIDATES}
    for row, cells in found.items():
        for name in names:
            shows(plain(cells[name]), [np.mean(values(row, name)), np.std(values(row, name), ddof=1)])
    assert [pair for pair, *_ in rows] == [f"{row} − fednca-ml" for row in CANDIDATES]
    for row, (_, *cells) in zip(CANDIDATES, rows, strict=True):
        for name, cell in zip(names, cells, strict=True):
            own, base = values(row, name), values("fednca-ml", name)
            low, high = stats.ttest_rel(own, base).confidence_interval(0.95)
            shows(cell, [np.mean(own) - np.mean(base), low, high])


def test_components_are_compared_with_what_they_are_added_to(whole, complete):
    *_, (_, rows) = tables(whole[0], f"### {SETTING}: components")
    called = {row[0]: row[1] for row in rows}
    steps = ["ETF − FC", "LADM + ETF − ETF", *(f"{name} − LADM + ETF" for name in [*COMPONENTS][3:])]
    assert [*called][:5] == steps
    assert [*called][5:] == [f"{name} − FC" for name in [*COMPONENTS][2:]]
    for names, cell in called.items():
        name, base = names.split(" − ")
        gaps = [
            metric(a, "macro-F1") - metric(b, "macro-F1")
            for a, b in zip(*(runs(complete, COMPONENTS[each]) for each in (name, base)), strict=True)
        ]
        low, high = stats.t.interval(0.95, 2, np.mean(gaps), stats.sem(gaps))
        shows(cell, [np.mean(gaps), low, high])
