"""Reads the tables of a page of results, and what they should hold out of records."""

import re

import numpy as np
import pytest
from plan import Entry, chosen_draw

SETTING = "dermamnist-0.1"
NUMBER = r"[-+]?\d+\.\d"


def tables(text, heading):
    """The tables below a heading and before the next one, each as rows by their first cell."""
    own = re.split(r"^#+ ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", own, flags=re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in block.splitlines()]
        found.append((lines[0], lines[2:]))
    return found


def by_name(table):
    header, rows = table
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def shows(text, values):
    """Assert that a text holds these numbers to one digit, in this order."""
    assert [float(found) for found in re.findall(NUMBER, text)] == pytest.approx(values, abs=0.0501)


def plain(cell):
    return re.sub(r"\*\*|</?u>", "", cell)


def runs(records, row, setting=SETTING):
    """A row's records on the draw taken; without a federation, those of the dataset's first setting."""
    if row == "centralized":
        setting = {"dermamnist-0.5": "dermamnist-0.1", "cifar10-0.1": "cifar10-0.5"}.get(setting, setting)
    found = [records.get(Entry(setting, row, chosen_draw(setting, records), seed).path) for seed in range(3)]
    return [record for record in found if record]


def metric(record, name, select="val"):
    if name.endswith("cal."):
        return 100 * record["results"][select]["calibrated"]["test"][column(name)]
    return 100 * record["results"][select]["test"][column(name)]


def column(name):
    return name.removesuffix(" cal.").replace("-", "_").lower()


def curve_of(record, name):
    metric = column(name) + ("_calibrated" if name.endswith(" cal.") else "")
    return [100 * value for value in record["curves"]["test"][metric]]


def level(record, name, mark):
    return np.mean(curve_of(record, name)[mark - 5 : mark])
