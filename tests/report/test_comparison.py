"""Tables of a bench beside the published values, against the arithmetic of the statistics module."""

import csv
import io
import json
import statistics
from dataclasses import replace

import pytest
from rich.text import Text

from fednca.bench.cells import Bench
from fednca.bench.rows import parse_rows
from fednca.config import load_config
from fednca.report.comparison import COLUMNS, FORMATS, Line, compare, to_csv, to_latex, to_markdown, to_text
from fednca.report.published import published

SEEDS = [0, 1, 2]
ROWS = ["centralized", "fedavg", "fednca-ml", "fednca-ml:variant=released", "fedprox:mu=0.5", "spherefed"]


def value(row, seed):
    return 0.9 - 0.1 * ROWS.index(row) + 0.01 * seed * (1 + ROWS.index(row))


@pytest.fixture
def bench(tmp_path):
    """Hand-made results of a bench: all seeds but for spherefed, which has not begun."""
    config = load_config("dermamnist-0.1")
    found = Bench(tmp_path, "dermamnist-0.1", {}, config, parse_rows(ROWS), SEEDS)
    for cell in found.cells():
        if cell.row.text == "spherefed":
            continue
        cell.folder.mkdir(parents=True)
        (cell.folder / "config.toml").write_text(cell.config.to_toml())
        metrics = dict.fromkeys(("macro_auc", "macro_f1", "micro_auc", "micro_f1"), value(cell.row.text, cell.seed))
        calibrated = {"test": {"macro_f1": 0.5, "micro_f1": 0.625}}
        chosen = {"round": 1, "test": metrics, "calibrated": calibrated}
        last = {"round": 2, "test": dict.fromkeys(metrics, 0.25), "calibrated": calibrated}
        results = {"val": chosen, "paper": {"round": 3, "test": metrics}, "last": last}
        (cell.folder / "results.json").write_text(json.dumps(results))
    return found


def test_means_deviations_and_published_values_stand_side_by_side(bench):
    lines = {line.name: line for line in compare(bench)}
    values = [100 * value("fedavg", seed) for seed in SEEDS]
    entry = lines["fedavg"].entries["macro_f1"]
    assert entry.mean == pytest.approx(statistics.fmean(values))
    assert entry.std == pytest.approx(statistics.stdev(values))
    assert entry.published == published("dermamnist", 0.1, "fedavg", "macro_f1") == 42.79
    assert entry.text() == "82.0±2.0 (42.8, +39.2)"
    released = lines["fednca-ml:variant=released"].entries["macro_auc"]
    assert released.published == published("dermamnist", 0.1, "fednca-ml", "macro_auc")
    assert lines["fedprox:mu=0.5"].entries["macro_auc"].published is None  # not the paper's
    assert lines["spherefed"].entries == dict.fromkeys(COLUMNS)


def test_the_best_federated_row_is_bold_the_second_underlined_and_what_was_not_run_says_so(bench):
    rows = {row.split(" | ")[0].strip("| "): row for row in to_markdown(compare(bench)).splitlines()}
    assert "**" not in rows["centralized"]
    assert rows["fedavg"].count("**82.0±2.0") == 4
    assert rows["fednca-ml"].count("<u>73.0±3.0") == 4
    assert rows["spherefed"].count("not run") == len(COLUMNS)
    latex = to_latex(compare(bench))
    assert latex.count(r"\textbf{82.0$\pm$2.0") == 4
    assert latex.count(r"\underline{73.0$\pm$3.0") == 4
    text = Text.from_markup(to_text(compare(bench)))
    assert {span.style for span in text.spans} == {"bold", "underline", "dim"}
    *table, legend = text.plain.splitlines()
    assert len({len(line) for line in table}) == 1
    assert "published" in legend


def test_a_row_with_some_seeds_says_how_many_and_is_not_the_best(bench):
    for seed in (1, 2):
        (bench.cell(bench.rows[1], seed).folder / "results.json").unlink()
    rows = {row.split(" | ")[0].strip("| "): row for row in to_markdown(compare(bench)).splitlines()}
    assert rows["fedavg"].startswith("| fedavg | 1 of 3 | 80.0 (")
    assert "<u>" not in rows["fedavg"]
    assert "**" not in rows["fedavg"]
    assert rows["fednca-ml"].count("**73.0±3.0") == 4
    assert rows["spherefed"].startswith("| spherefed | 0 of 3 | not run |")


def test_what_must_be_said_of_a_row_stands_in_every_format(bench):
    rows = parse_rows(["fedavg", "fedlgt", "scaffold@fedlgt"])
    lines = compare(replace(bench, rows=rows))
    for form, write in FORMATS.items():
        written = Text.from_markup(write(lines, "val")).plain if form == "text" else write(lines, "val")
        for name in ("fedlgt", "scaffold@fedlgt"):
            said = [row for row in written.splitlines() if row.startswith(name) and "random orthonormal" in row]
            assert len(said) == (len(COLUMNS) if form == "csv" else 1), form
        assert not any("orthonormal" in row for row in written.splitlines() if row.startswith("fedavg"))


def test_latex_has_no_sign_of_its_own_in_a_name():
    line = Line(r"a_b%c&d#e$f{g}h~i^j\k", [], 1, {}, federated=True)
    escaped = r"a\_b\%c\&d\#e\$f\{g\}h\~{}i\^{}j\textbackslash{}k"
    assert any(row.startswith(f"{escaped} & 0 of 1") for row in to_latex([line]).splitlines())


def test_ways_to_choose_a_round_are_kept_apart(bench):
    last, paper = ({line.name: line for line in compare(bench, which)} for which in ("last", "paper"))
    assert last["fedavg"].entries["macro_auc"].mean == 25.0
    assert last["fedavg"].entries["macro_f1_calibrated"].mean == 50.0
    assert last["fedavg"].entries["micro_f1_calibrated"].mean == 62.5
    assert paper["fedavg"].entries["macro_f1_calibrated"] is None


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_says_how_the_round_was_chosen(bench, form):
    names = {"val": "best validation", "paper": "best test", "last": "last round"}
    for select, name in names.items():
        written = FORMATS[form](compare(bench, select), select)
        said = {row["select"] for row in csv.DictReader(io.StringIO(written))} if form == "csv" else set()
        assert said == {select} if form == "csv" else f"round: {name}" in written
        assert not any(f"round: {other}" in written for other in names.values() if other != name)


def test_the_legend_speaks_of_published_values_only_where_some_are_shown(bench):
    ours = compare(replace(bench, rows=parse_rows(["fedprox:mu=0.5"])))
    assert "published" in to_markdown(compare(bench))
    assert "published" not in to_markdown(ours)


def test_csv_holds_the_unrounded_numbers(bench):
    lines = compare(bench)
    rows = list(csv.DictReader(io.StringIO(to_csv(lines))))
    assert len(rows) == len(ROWS) * len(COLUMNS)
    for row in rows:
        entry = next(line for line in lines if line.name == row["method"]).entries[row["metric"]]
        assert (float(row["mean"]) if row["mean"] else None) == (entry and entry.mean)
