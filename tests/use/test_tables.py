"""Tables of metrics at the width of a terminal."""

from functools import partial

import pytest
from rich.console import Console

from fednca.measures.metrics import SHOWN
from fednca.use.tables import classes_table, fit, means_table

SURE = {"value": 1.0, "low": 1.0, "high": 1.0}
GROUPS = [
    (name, {"images": 12345, "metrics": dict.fromkeys(SHOWN, SURE)}) for name in ("all", "South", "Hospital North")
]
CLASSES = {"Pneumothorax": {"positives": 12345, "threshold": 0.5} | dict.fromkeys(("auc", "ap", "f1"), SURE)}


def lines(table, width, capsys):
    console = Console(width=width)
    console.print(fit(table, console))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("make", "facts"), [(partial(means_table, "metrics"), GROUPS), (classes_table, CLASSES)])
def test_names_stand_whole_beside_all_numbers(make, facts, width, capsys):
    shown = lines(partial(make, facts), width, capsys)
    for name in dict(facts):
        assert sum(line.startswith(f" {name}  ") and "12345" in line for line in shown) == 1
    intervals = sum(line.count("100.0–100.0") for line in shown)
    assert intervals == sum(4 if facts is GROUPS else 3 for _ in facts)
    assert max(map(len, shown)) <= width


def test_metrics_stand_beside_their_intervals_where_there_is_room(capsys):
    assert any(line.count("100.0 100.0–100.0") == 4 for line in lines(partial(means_table, "", GROUPS), 120, capsys))


def test_a_group_of_the_name_all_stands_beside_all_images(capsys):
    shown = lines(partial(means_table, "", [GROUPS[0], GROUPS[0]]), 120, capsys)
    assert sum(line.startswith(" all  ") for line in shown) == 2
