"""A site's table must stay what it was when the run began there: dealt anew, test images would be trained on."""

import csv
import shutil

import pytest
from folders import write_sites
from helpers import tiny
from in_process import InProcessGrid, settings_for

from fednca.flower.assignment import Assignment
from fednca.flower.config import load_site
from fednca.flower.server import serve
from fednca.flower.site import open_folder
from fednca.runs import Run

DIGITS = [f"digit {digit}" for digit in range(10)]
RUN = "0" * 16


def read(table):
    with table.open(newline="") as file:
        return list(csv.reader(file))


def write(table, rows):
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def without_split(table):
    write(table, [[row[0], *row[2:]] for row in read(table)])


def append_row(table):
    """Append a copy of the first image, as a site that gets a further case would."""
    rows = read(table)
    shutil.copy(table.parent / "images" / rows[1][0], table.parent / "images/new.png")
    write(table, [*rows, ["new.png", *rows[1][1:]]])


def flip_label(table):
    rows = read(table)
    rows[-1][-1] = str(1 - int(rows[-1][-1]))
    write(table, rows)


def swap_equal_rows(table):
    """Swap the names of two images that show the same."""
    rows = read(table)
    one, other = next((a, b) for b in range(2, len(rows)) for a in range(1, b) if rows[a][1:] == rows[b][1:])
    rows[one][0], rows[other][0] = rows[other][0], rows[one][0]
    write(table, rows)


def change_split(table):
    without_split(table)
    rows = read(table)
    parts = ["split", *("test" if number % 4 == 0 else "train" for number in range(len(rows) - 1))]
    write(table, [[row[0], part, *row[1:]] for row, part in zip(rows, parts, strict=True)])


def rename_class(table):
    table.write_text(table.read_text().replace("digit 9", "digit nine", 1))


def hold_out_more(table):
    site = table.parent / "site.toml"
    site.write_text(site.read_text() + "val_fraction = 0.3\n")


CHANGES = [append_row, flip_label, swap_equal_rows, change_split, rename_class, hold_out_more]


@pytest.fixture
def site(tmp_path):
    path = write_sites(tmp_path / "sites", {"north": DIGITS}, images=36)["north"]
    without_split(path.parent / "labels.csv")
    return path


def digest(path):
    return open_folder(load_site(path), Assignment(config=tiny(), run=RUN)).data


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_moves_images_between_train_val_and_test_is_noticed(change, site):
    before = digest(site)
    assert digest(site) == before
    change(site.parent / "labels.csv")
    assert digest(site) != before


def test_a_folder_that_was_moved_as_a_whole_has_the_same_data(site, tmp_path):
    before = digest(site)
    shutil.move(site.parent, tmp_path / "elsewhere")
    assert digest(tmp_path / "elsewhere/site.toml") == before


def test_a_class_added_before_a_sites_first_work_is_refused_until_it_is_taken_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fednca.flower.client.LOG.parent.propagate", True)
    sites = write_sites(tmp_path / "sites", dict.fromkeys(["east", "north"], DIGITS), images=36)
    table = sites["north"].parent / "labels.csv"
    before = table.read_text()

    def change(message, reply):
        rounds = message.metadata.group_id
        if message.metadata.message_type == "query":
            write(table, [[*row, "mass" if number == 0 else "1"] for number, row in enumerate(read(table))])
        elif rounds == "1" and message.metadata.message_type == "evaluate":
            table.write_text(before)
        return reply

    grid = InProcessGrid(*({"site": str(path)} for path in sites.values()))
    grid.nodes[999].fault = change
    config = tiny(method__name="fedavg", train__rounds=2)
    run = Run(serve(grid, settings_for(config, tmp_path, sites=list(sites), min_sites=1)))

    refused = {"north": "it could not do its part (FedncaError); its own log says why"}
    assert [record["left_out"] for record in run.history] == [refused, {}]
    assert "site 'north' has class 'mass', which the federation does not" in caplog.text
    assert "remove it at the site" in caplog.text


def test_a_site_whose_table_changes_is_left_out_until_it_is_put_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fednca.flower.client.LOG.parent.propagate", True)
    sites = write_sites(tmp_path / "sites", dict.fromkeys(["east", "north", "south"], DIGITS), images=36)
    table = sites["south"].parent / "labels.csv"
    without_split(table)
    before = table.read_text()

    def change(message, reply):
        if message.metadata.message_type == "evaluate":
            if message.metadata.group_id == "1":
                append_row(table)
            else:
                table.write_text(before)
        return reply

    grid = InProcessGrid(*({"site": str(path)} for path in sites.values()))
    grid.nodes[998].fault = change
    config = tiny(method__name="fedavg", train__rounds=3)
    run = Run(serve(grid, settings_for(config, tmp_path, sites=list(sites))))

    refused = {"south": "it could not do its part (ChangedDataError); its own log says why"}
    assert [record["left_out"] for record in run.history] == [{}, refused, {}]
    assert [record.get("not_judged_by", {}) for record in run.history] == [{}, refused, {}]
    assert [record["took_part"] for record in run.history][1:] == [["east", "north"], ["east", "north", "south"]]
    assert "put table and site.toml back as they were, or begin a new run" in caplog.text

    (noted,) = sites["south"].parent.glob("state/*.data")
    assert noted.stem == run.environment["run"]
    told = "".join(str(reply.content) for _, reply in grid.sent if not reply.has_error())
    assert noted.read_text() not in told
