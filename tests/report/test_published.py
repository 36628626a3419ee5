"""What the paper reports of a run, against numbers copied from its tables."""

import pytest

from fednca.config import load_config
from fednca.report import published as module
from fednca.report.published import published, reported


def test_published_numbers_are_found_by_all_four_keys(tmp_path, monkeypatch):
    path = tmp_path / "published.csv"
    path.write_text(
        "dataset,beta,method,metric,value,std\nvoc,0.05,fedavg,macro_f1,41.50,0.1\nvoc,0.05,fedavg,micro_f1,2,\n"
    )
    monkeypatch.setattr(module, "PUBLISHED", path)
    assert published("voc", 0.05, "fedavg", "macro_f1") == 41.5
    assert published("voc", 0.05, "fedavg", "micro_f1") == 2
    for other in (("coco", 0.05, "fedavg", "macro_f1"), ("voc", 0.01, "fedavg", "macro_f1")):
        assert published(*other) is None


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        (
            {"seed": 3, "partition.seed": 2, "data.image_size": 112, "train.precision": "bf16"},
            True,
        ),  # the paper is silent
        ({"train.rounds": 30}, False),
        ({"partition.clients": 5}, False),
        ({"partition.gamma": 0.5}, False),
        ({"partition.beta": 0.5}, True),  # another setting of the paper's
        ({"partition.beta": 0.3}, False),
        ({"method.learner": "fednca-ml"}, False),
        ({"method.criterion": "asl"}, False),
    ],
)
def test_published_numbers_do_not_stand_beside_other_settings(changes, kept):
    assert bool(reported(load_config("dermamnist-0.1", {"method.name": "scaffold", **changes}))) == kept


@pytest.mark.parametrize(
    ("method", "options", "macro_f1"),
    [
        ("fedavg", {}, 42.79),
        ("fedprox", {"mu": 0.01}, 43.54),  # the default, as a run writes it out
        ("fedprox", {"mu": 10.0}, None),
        ("fednca-ml", {"variant": "released", "lambda1": 0.01, "position": False}, 50.54),
        ("fednca-ml", {"lambda1": 0.5}, None),
    ],
)
def test_published_numbers_do_not_stand_beside_other_options(method, options, macro_f1):
    config = load_config("dermamnist-0.1", {"method.name": method, "method.options": options})
    assert reported(config).get("macro_f1") == macro_f1
