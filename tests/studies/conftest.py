"""Records of a study that was never run: a real record of a tiny run, its numbers replaced."""

import copy
import json
from zlib import crc32

import numpy as np
import pytest
from helpers import tiny
from page import make_page, write_page
from plan import DRAWS, SETTINGS, Entry, draws, plan
from records import make_record, write_record

from fednca.runs import train

CLASSES = {"dermamnist": 7, "cifar10": 10, "coco": 80, "nih": 14, "digits": 10}
SPLITS = ("val", "test")
NOTE = "text table: random orthonormal stand-in"


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    return train(tiny(train__rounds=2), tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture(scope="session")
def real_record(tiny_run, tmp_path_factory):
    """A record as a study writes it, read back from its file."""
    folder, entry = tmp_path_factory.mktemp("records"), Entry("dermamnist-0.1", "fedavg", 0, 0)
    write_record(entry, tiny_run, "0123456789abcdef", folder)
    found = json.loads((folder / entry.path).read_text(encoding="utf-8"))
    assert found.keys() == make_record(entry, tiny_run, "0123456789abcdef").keys()
    return found


@pytest.fixture(scope="session")
def invent(real_record):
    """A function that makes an entry's record, its numbers drawn by the entry's path."""

    def make(entry):
        rng = np.random.default_rng(crc32(str(entry.path).encode()))
        dataset, classes = entry.setting.rpartition("-")[0], CLASSES[entry.setting.partition("-")[0]]
        record = copy.deepcopy(real_record)
        record |= {"row": entry.row, "setting": entry.setting, "draw": entry.draw, "seed": entry.seed}
        record |= {"note": NOTE if entry.row == "fedlgt" else "", "seconds": 90.0, "gpu": "a GPU"}
        record["classes"] = [f"class {c}" for c in range(classes)]
        record["partition"] |= {
            "label_distance": round(rng.uniform(0.3, 0.9), 5),
            "missing_classes": round(rng.uniform(1, 4), 5),
            "cooccurrence_distance": round(rng.uniform(0.3, 0.9), 5),
        }
        own = entry.config()
        record["config"]["data"]["name"], record["config"]["partition"]["beta"] = dataset, own.partition.beta
        record["config"]["train"]["lr"] = own.train.lr
        record["config"]["train"]["rounds"] = entry.rounds
        for result in record["results"].values():
            replace_numbers(result, rng, classes)
        rounds = list(range(1, entry.rounds + 1))
        record["curves"] = {"round": rounds} | {
            split: {metric: rng.uniform(0.3, 0.9, len(rounds)).round(5).tolist() for metric in record["curves"][split]}
            for split in SPLITS
        }
        record["features"] = invent_features(record["features"], rng, classes) if entry.keeps_features else None
        return record

    return make


def replace_numbers(result, rng, classes):
    """Replace all metrics of a round by random ones."""
    for metrics in [result[split] for split in SPLITS] + [result.get("calibrated", {}).get(split) for split in SPLITS]:
        for name, value in (metrics or {}).items():
            drawn = rng.uniform(0.3, 0.9, classes).round(5).tolist()
            metrics[name] = drawn if isinstance(value, list) else drawn[0]


def invent_features(features, rng, classes):
    points = 40
    return features | {
        "places": rng.uniform(-50, 50, (points, 2)).round(1).tolist(),
        "classes": rng.integers(classes, size=points).tolist(),
        "label_counts": rng.integers(1, 3, size=points).tolist(),
        "silhouette": {name: round(rng.uniform(-1, 1), 5) for name in features["silhouette"]},
        "mean_cosines": rng.uniform(-1, 1, (classes, classes)).round(5).tolist(),
        "raw_cosines": rng.uniform(-1, 1, (classes, classes)).round(5).tolist(),
    }


@pytest.fixture(scope="session")
def complete(invent):
    """All records that a plan ends with, by path."""
    records = {}
    while missing := [entry for entry in plan(records) if entry.path not in records]:
        records |= {entry.path: invent(entry) for entry in missing}
    return records


@pytest.fixture(scope="session")
def tried_draws(invent):
    """The records of all draws, and of nothing else."""
    entries = [entry for setting in SETTINGS for entry in draws(setting)]
    assert len(entries) == len(SETTINGS) * len(DRAWS)
    return {entry.path: invent(entry) for entry in entries}


@pytest.fixture(scope="session")
def whole(complete, tmp_path_factory):
    """The page of all records, written, and where."""
    out = tmp_path_factory.mktemp("whole")
    made = make_page(complete)
    write_page(made, out)
    return made.text, out
