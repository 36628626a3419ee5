"""What is run and in which order, against counts and distances worked out by hand."""

import csv
from itertools import product

import numpy as np
from plan import (
    ABLATED,
    CALIBRATION,
    CIFAR10,
    COMPONENTS,
    DERMAMNIST,
    DRAWS,
    EXTRAS_OF,
    FEDNCA,
    GRID,
    QUERIES,
    SAMPLES,
    SETTINGS,
    TABLE,
    VOC,
    Entry,
    chosen_draw,
    draws,
    gap,
    plan,
    spread,
    strongest_other,
    voc,
)

from fednca.report.published import PUBLISHED

METRICS = ("macro_auc", "macro_f1", "micro_auc", "micro_f1")


def reported(setting):
    """What the paper's FedAvg row says, read from the file of published numbers."""
    dataset, _, beta = setting.rpartition("-")
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["dataset"], row["beta"]) == (dataset, beta)]
    found = {row["metric"]: float(row["value"]) for row in rows if row["method"] == "fedavg"}
    return np.array([found[metric] for metric in METRICS])


def draws_at(setting, distances, invent):
    """Records of a setting's draws, each so many points beside the published values, to either side."""
    records = {}
    for entry, distance in zip(draws(setting), distances, strict=True):
        record = invent(entry)
        values = (reported(setting) + distance * np.array([1, -1, 1, -1])) / 100
        record["results"]["val"]["test"] |= dict(zip(METRICS, values.tolist(), strict=True))
        records[entry.path] = record
    return records


def test_the_draw_nearest_to_the_published_fedavg_is_taken(invent):
    for setting in SETTINGS:
        records = draws_at(setting, [3.0, 2.0, 5.0, 0.5, 1.0], invent)
        assert chosen_draw(setting, records) == 3
        gaps = [gap(records[entry.path]) for entry in draws(setting)]
        np.testing.assert_allclose(gaps, [3.0, 2.0, 5.0, 0.5, 1.0])


def test_open_choices_are_tried_on_centralised_and_fedavg_rows_before_anything_else_of_the_setting():
    entries = plan({})
    places = [place for place, entry in enumerate(entries) if entry in CALIBRATION]
    assert len(places) == len(CALIBRATION)
    assert {entry.row for entry in CALIBRATION} == {"centralized", "fedavg", "fedavg:head=mlp"}
    others = [place for place, entry in enumerate(entries) if entry.setting in CIFAR10 and entry not in CALIBRATION]
    assert max(places) < min(others)
    configs = [entry.config() for entry in CALIBRATION]
    assert [config.data.image_size for config in configs] == [64, 112, 64, 112, 64, 224, 112, 112, 224, 64]
    singles = [config.data.options.get("train_singles") for config in configs]
    assert singles == [None, None, 1000, 1000, 500, 1000, None, 1000, 1000, None]
    assert len({entry.path for entry in CALIBRATION}) == len(CALIBRATION)


def test_samples_come_after_what_can_be_held_against_the_paper(tried_draws):
    entries = plan(tried_draws)
    places = {setting: [at for at, entry in enumerate(entries) if entry.setting == setting] for setting in SAMPLES}
    extras = [at for at, entry in enumerate(entries) if entry.row in EXTRAS_OF.get(entry.setting, ())]
    assert max(extras) < min(places["coco-sample-0.05"])
    assert max(places["coco-sample-0.05"]) < min(places["nih-sample-0.5"])
    after = [entry.setting for entry in entries[max(map(max, places.values())) + 1 :]]
    assert set(after) == set(GRID)
    coco, nih = (Entry(setting, "fedavg", 0, 0).config() for setting in ("coco-sample-0.05", "nih-sample-0.1"))
    assert (coco.data.name, coco.partition.beta, coco.partition.gamma) == ("coco", 0.05, 0.75)
    assert (nih.data.name, nih.partition.beta, nih.partition.gamma) == ("folder", 0.1, 0.5)
    assert (coco.evaluate.select, nih.evaluate.select) == ("macro_f1", "macro_auc")


def test_digits_are_dealt_by_each_beta_and_gamma_on_three_draws():
    entries = [entry for entry in plan({}) if entry.setting in GRID]
    dealt = {(c.partition.beta, c.partition.gamma, c.partition.seed) for c in (entry.config() for entry in entries)}
    assert dealt == set(product((0.1, 5.0), (0.3, 0.5, 1.0), (0, 1, 2)))
    configs = [entry.config() for entry in entries]
    assert {(c.data.name, c.seed, c.train.precision) for c in configs} == {("digits", 0, "float32")}
    longer = {(e.row, c.partition.gamma) for e, c in zip(entries, configs, strict=True) if c.train.rounds != 50}
    assert longer == set(product(("fedavg", "fednca-ml"), (0.3, 0.5)))
    rates = [(entry.row, config.train.lr) for entry, config in zip(entries, configs, strict=True)]
    assert {pair for pair in rates if pair[1] != 0.005} == {("fedavg", lr) for lr in (0.0005, 0.001, 0.002, 0.01)}


def test_fedlgt_has_real_text_embeddings_where_there_are_any():
    texts = {setting: Entry(setting, "fedlgt", 0, 0).config().method.options.get("text") for setting in SETTINGS}
    assert texts == dict.fromkeys(DERMAMNIST) | dict.fromkeys(CIFAR10, "data/clip/cifar10.npz")
    assert "text" not in Entry("cifar10-0.5", "fedavg", 0, 0).config().method.options


def test_voc_has_the_papers_tables_on_the_first_draw_beside_the_plan(complete):
    entries = voc({})
    assert {entry.setting for entry in plan(complete)}.isdisjoint(VOC)
    assert {(entry.draw, entry.rounds) for entry in entries} == {(0, 100)}
    trained = {(entry.setting, entry.row, entry.seed) for entry in entries}
    centralized = set(product(VOC[1:], ["centralized"], (0, 1, 2)))  # the same as in the other setting
    assert trained == set(product(VOC, TABLE, (0, 1, 2))) - centralized
    configs = {entry: entry.config() for entry in entries}
    dealt = {(entry.setting, c.partition.beta, c.partition.gamma, c.data.image_size) for entry, c in configs.items()}
    assert dealt == {("voc-0.05", 0.05, 0.5, 224), ("voc-0.01", 0.01, 0.5, 224)}
    assert {(c.data.root, c.train.precision) for c in configs.values()} == {("data/voc", "bf16")}
    texts = {entry.row: c.method.options.get("text") for entry, c in configs.items()}
    assert {row: text for row, text in texts.items() if text} == {"fedlgt": "data/clip/voc20.npz"}


def test_no_draw_is_taken_while_one_is_untried(invent):
    records = draws_at("cifar10-0.5", [3.0, 2.0, 5.0, 0.5, 1.0], invent)
    del records[Entry("cifar10-0.5", "fedavg", 2, 0, 30).path]
    assert chosen_draw("cifar10-0.5", records) is None


def test_the_plan_begins_with_the_draws_alone():
    elsewhere = {*SAMPLES, *GRID}
    entries = [entry for entry in plan({}) if entry not in CALIBRATION and entry.setting not in elsewhere]
    assert {(e.setting, e.draw) for e in entries} == set(product(SETTINGS, DRAWS))
    assert len(entries) == 20
    assert {(e.row, e.seed, e.rounds) for e in entries} == {("fedavg", 0, 30)}


def test_the_plan_grows_once_draws_are_chosen(invent, tried_draws, complete):
    one = draws_at("dermamnist-0.1", [3.0, 2.0, 5.0, 0.5, 1.0], invent)
    sizes = [len(plan(records)) for records in ({}, one, tried_draws, complete)]
    # One setting: its table, 4 component rows of its own, FedAvg and FedNCA-ML on four more draws, 8 extras, 3
    # candidates, 2 queries.
    assert sizes[1] - sizes[0] == 9 * 3 + 4 * 3 + 4 * 3 + (8 + 3) * 3 + 2 * 3
    # Ten runs try out open choices, and three samples have tables of their own; three settings show the centralised
    # runs of another. The strongest other method adds four draws to each setting, once it is known. Digits are dealt in
    # six ways, each on three draws, and trained with four more learning rates, and in four ways for longer,
    # and with three candidates.
    digits = 6 * 3 * 7 + 4 + 4 * 3 * (2 + 3)
    assert sizes[2] == 10 + 7 * 9 * 3 - 3 * 3 + 20 + 2 * 4 * 3 + 4 * 4 * 3 + 2 * (8 + 3 + 1) * 3 + 2 * 2 * 3 + digits
    assert sizes[3] - sizes[2] == 4 * 4


def test_no_run_is_planned_twice_and_no_two_share_a_record(complete):
    entries = plan(complete)
    assert len(set(entries)) == len(entries) == len({entry.path for entry in entries})


def test_each_part_has_the_runs_it_needs(complete):
    planned = {(e.setting, e.row, e.draw, e.seed) for e in plan(complete) if e.rounds == 100}
    chosen = {setting: chosen_draw(setting, complete) for setting in SETTINGS}

    def has_three_seeds(settings, rows):
        wanted = {(s, row, chosen[s], seed) for s, row, seed in product(settings, rows, (0, 1, 2))}
        return wanted <= planned

    eight = {"fedavg", "fedprox", "fedcurv", "scaffold", "spherefed", "fedlgt", "centralized", "fednca-ml"}
    assert set(TABLE) == eight | {"fednca-ml:variant=released"}
    assert has_three_seeds(SETTINGS, TABLE[:-1])
    assert has_three_seeds(("dermamnist-0.1", "cifar10-0.5"), ["centralized"])
    assert has_three_seeds(ABLATED, COMPONENTS.values())
    assert {setting: len(rows) for setting, rows in EXTRAS_OF.items() if has_three_seeds([setting], rows)} == {
        **dict.fromkeys(DERMAMNIST, 8),
        **dict.fromkeys(CIFAR10, 1),
    }
    assert has_three_seeds(ABLATED, QUERIES.values())
    for setting in SETTINGS:
        rows = {entry.row for entry in spread(setting, complete)}
        assert rows > {"fedavg", *FEDNCA}
        assert len(rows) == 4
        for row in rows:
            assert len({draw for s, r, draw, seed in planned if (s, r, seed) == (setting, row, 0)}) == 5


def test_features_are_kept_for_three_components_of_two_settings(complete):
    kept = [entry for entry in plan(complete) if complete[entry.path]["features"] and entry.rounds == 100]
    rows = {"fedavg", "fednca-ml:lambda1=0,lambda2=0", "fednca-ml"}
    for setting in ("dermamnist-0.1", "cifar10-0.5"):
        draw = chosen_draw(setting, complete)
        assert {entry.row for entry in kept if (entry.setting, entry.draw) == (setting, draw)} == rows


def test_the_strongest_other_method_has_the_best_validation_mean(complete):
    setting = "dermamnist-0.5"
    draw = chosen_draw(setting, complete)
    others = ("fedprox", "fedcurv", "scaffold", "spherefed", "fedlgt")
    means = [
        np.mean([complete[Entry(setting, row, draw, s).path]["results"]["val"]["val"]["macro_f1"] for s in range(3)])
        for row in others
    ]
    assert strongest_other(setting, draw, complete) == others[np.argmax(means)]
    fewer = {path: record for path, record in complete.items() if path != Entry(setting, "fedlgt", draw, 1).path}
    assert strongest_other(setting, draw, fewer) is None
