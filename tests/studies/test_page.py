"""The page of results from no records, some and all: what it says, links to and is made of again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import page
import pytest
from page import FOLDER, PAGE, main, make_page, records_of
from plan import SAMPLES, SETTINGS, VOC, Entry, chosen_draw
from reading import NUMBER, SETTING, by_name, metric, shows, tables
from records import RECORDS, read_records
from study import tried

from fednca.config import build_config
from fednca.report.groups import what_it_is
from fednca.runs.run import without_unread

SCRIPT = Path(page.__file__)


@pytest.fixture(scope="module")
def partial(complete):
    """Records of one setting alone: SCAFFOLD with two seeds, FedLGT with one and SphereFed with none."""
    gone = {("scaffold", 2), ("fedlgt", 1), ("fedlgt", 2), *(("spherefed", seed) for seed in range(3))}
    own = {path: record for path, record in complete.items() if record["setting"] == SETTING}
    return {path: record for path, record in own.items() if (record["row"], record["seed"]) not in gone}


def test_the_note_of_a_row_stands_wherever_the_row_does(whole, partial):
    note = "fedlgt: text table: random orthonormal stand-in."
    for text in (whole[0], make_page(partial).text):
        sections = re.split(r"^#{2,3} ", text, flags=re.MULTILINE)
        for block in sections:
            tabled = re.findall(rf"^\| (?!`).*fedlgt.*{NUMBER}", block, flags=re.MULTILINE)
            if tabled or "curves-" in block or "gains.svg" in block:
                assert note in block, block[:80]


def test_a_note_that_holds_of_some_settings_names_them(complete):
    cifar = [path for path, record in complete.items() if record["setting"].startswith("cifar10")]
    text = make_page(complete | {path: complete[path] | {"note": ""} for path in cifar}).text
    sections = {block.split("\n", 1)[0]: block for block in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)}
    assert "\nfedlgt: text table" in sections["dermamnist-0.1"]
    assert "text table" not in sections["cifar10-0.5"]
    for name in ("Learning curves", "When does it help?"):
        assert "\nfedlgt on dermamnist-0.1, dermamnist-0.5: text table" in sections[name]


def test_what_has_not_been_run_says_so(partial):
    text = make_page(partial).text
    main_table = by_name(tables(text, f"### {SETTING}")[0])
    assert set(main_table["spherefed"].values()) == {"not run", "0 of 3"}
    assert main_table["scaffold"]["seeds"] == "2 of 3"
    assert re.match(rf"{NUMBER}±{NUMBER} ", main_table["scaffold"]["macro-F1"])
    assert main_table["fedlgt"]["seeds"] == "1 of 3"
    assert re.match(rf"{NUMBER} \(", main_table["fedlgt"]["macro-F1"])  # one run has no deviation
    assert not any(cell.startswith(("**", "<u>")) for cell in main_table["scaffold"].values())
    for untouched in ("cifar10-0.5", "cifar10-0.5: draws", "cifar10-0.5: components", "cifar10-0.5: features"):
        assert f"\n### {untouched}\n\nnot run\n" in text
    assert f"{FOLDER}/curves-{SETTING}.svg" in text
    assert "curves-cifar10-0.5" not in text


def test_without_any_record_there_are_no_numbers_of_ours():
    made = make_page({})
    assert not made.figures
    assert "![" not in made.text
    assert not re.search(rf"{NUMBER}±|\[{NUMBER}", made.text)
    blocks = [block for block in re.split(r"^### ", made.text, flags=re.M) if block.startswith((*SETTINGS, *SAMPLES))]
    assert len(blocks) == 4 + 4 + 4 + 2 + 2 + 4 + 2 + 3 + 2
    for block in blocks:
        assert block.split("\n\n")[1].startswith("not run"), block
    parts = tables(made.text, "## How it was run")[1][1]
    assert {done for _, done, _ in parts} == {"0"}
    assert "\n0 of 572 runs are done" in made.text


def test_a_run_that_was_tried_out_stands_apart(whole, complete, invent):
    entry = Entry(SETTING, "fedavg", chosen_draw(SETTING, complete), 0, changes=(("data.image_size", 96),))
    text = make_page(complete | {entry.path: invent(entry)}).text
    fewer, fewest = "-train_singles-1000-train_pairs-65", "-train_singles-500-train_pairs-32"
    planned = {f"`image_size-{of}`" for of in ("64", "112", f"64{fewer}", f"112{fewer}", f"224{fewer}", f"64{fewest}")}
    assert {row[2] for row in tables(text, "## Tried out")[0][1]} == {"`image_size-96`", *planned}
    assert {row[2] for row in tables(whole[0], "## Tried out")[0][1]} == planned
    assert tables(text, f"### {SETTING}") == tables(whole[0], f"### {SETTING}")
    header, rows = tables(text, "## Tried out")[0]
    cells = next(dict(zip(header, row, strict=True)) for row in rows if "96" in row[2])
    published = {"macro-AUC": 83.88, "macro-F1": 42.79, "micro-AUC": 87.23, "micro-F1": 62.81}
    for name, known in published.items():
        value = metric(invent(entry), name)
        shows(cells[name], [value, known, value - known])
    distances = [abs(metric(invent(entry), name) - known) for name, known in published.items()]
    shows(cells["to published"], [sum(distances) / 4])


def test_every_record_is_listed(whole, complete):
    rows = tables(whole[0], "## Records")[0][1]
    assert {row[0].strip("`") for row in rows} == {path.as_posix() for path in complete}
    seconds = sum(record["seconds"] for record in complete.values())
    assert f"{seconds / 3600:.1f} hours" in whole[0]


def test_links_lead_to_figures_and_headings(whole):
    text, out = whole
    links = re.findall(r"\]\(([^)]+)\)", text)
    anchors = {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in re.findall(r"^#+ (.+)$", text, re.M)}
    pictures = [link for link in links if link.endswith(".svg")]
    assert set(links) == {*pictures, "methods.md", *(link for link in links if link.startswith("#"))}
    assert (page.OUT / "methods.md").is_file()
    assert {path.name for path in (out / FOLDER).iterdir()} == {Path(link).name for link in pictures}
    assert len(pictures) == len(SETTINGS) + 2 + 2 * 2
    assert all((out / link).stat().st_size < 300_000 for link in pictures)
    assert {link[1:] for link in links if link.startswith("#")} <= anchors


def write_records(records, folder):
    for path, record in records.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(record), encoding="utf-8")


def test_the_same_records_give_the_same_bytes_in_another_process(whole, complete, tmp_path):
    records, out = tmp_path / "records", tmp_path / "docs"
    write_records(dict(reversed(complete.items())), records)
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, SCRIPT, "--records", records, "--out", out], check=True, env=environment)
    names = [PAGE, *(f"{FOLDER}/{path.name}" for path in (whole[1] / FOLDER).iterdir())]
    for name in names:
        assert (out / name).read_bytes() == (whole[1] / name).read_bytes(), name


def test_a_check_fails_until_the_page_is_written_again(complete, tried_draws, tmp_path):
    records, out = tmp_path / "records", tmp_path / "docs"
    run = Entry(SETTING, "fedavg", chosen_draw(SETTING, complete), 0).path
    write_records(tried_draws | {run: complete[run]}, records)
    command = ["--records", str(records), "--out", str(out)]
    with pytest.raises(SystemExit, match="does not match the records"):
        main([*command, "--check"])
    (out / FOLDER).mkdir(parents=True)
    (out / FOLDER / "gone.svg").write_text("an earlier figure")
    main(command)
    main([*command, "--check"])
    assert not (out / FOLDER / "gone.svg").exists()
    figure = out / FOLDER / f"curves-{SETTING}.svg"
    figure.write_bytes(figure.read_bytes().replace(b"#", b"", 1))
    with pytest.raises(SystemExit, match="figures"):
        main([*command, "--check"])
    figure.unlink()
    with pytest.raises(SystemExit, match="figures"):
        main([*command, "--check"])


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "a file").touch()
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(tmp_path / "a file" / "docs")])
    assert stop.value.code == 2
    assert "a file" in capsys.readouterr().err.splitlines()[-1]


def test_every_record_is_of_a_run_as_the_plan_has_it():
    untried = {path: record for path, record in read_records().items() if not tried(path, record)}
    assert untried
    for path, record in untried.items():
        found = build_config(without_unread(record["config"]))
        place = [record[key] for key in ("setting", "row", "draw", "seed")]
        entry = Entry(*place, found.train.rounds)
        assert entry.path == path
        assert what_it_is(found) == what_it_is(entry.config()), path
        assert (found.seed, found.partition.seed) == (record["seed"], record["draw"])


def test_records_of_voc_are_kept_and_not_shown():
    kept = read_records()
    shown = records_of(RECORDS)
    assert {record["setting"] for path, record in kept.items() if path not in shown} == set(VOC)


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--records", str(tmp_path / "nowhere")])
    assert stop.value.code == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_page_in_the_repository_is_what_its_records_give():
    """Its figures too, but for what processors may differ in: `page.py --check` compares these as files."""
    made = make_page(records_of(RECORDS))
    assert (page.OUT / PAGE).read_text(encoding="utf-8") == made.text
    assert {path.stem for path in (page.OUT / FOLDER).iterdir()} == made.figures.keys()
