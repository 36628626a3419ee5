"""Real images from their files to a trained round: read, dealt, stored, trained on and tested."""

import numpy as np
import pytest

from fednca.config import load_config
from fednca.runs import Run, train

FEW = {"train_singles": 100, "train_pairs": 5, "val_singles": 20, "val_pairs": 1, "test_singles": 50, "test_pairs": 2}
SETTINGS = {
    "dermamnist": ("dermamnist-0.1", {}, "."),
    "coco": ("coco-0.05", {}, "coco"),
    "chest X-rays": ("chestxray14-0.1", {"data.name": "folder", "data.options": {"table": "labels.csv"}}, "nih-sample"),
    "scenes": ("voc-0.05", {"data.name": "folder", "partition.gamma": 1.0}, "scenes"),
}


@pytest.mark.data
@pytest.mark.parametrize("name", SETTINGS)
def test_one_round(name, data_folder, tmp_path):
    preset, changes, root = SETTINGS[name]
    if name == "coco":  # 80 classes do not fit an ETF in the small backbone's 64 channels
        changes = {"method.name": "fedavg"}
    federation = train_one_round(preset, changes, data_folder / root, tmp_path)
    if federation.train.split.groups is not None:
        assert_patients_stay_together(federation)


@pytest.mark.cifar10
def test_one_round_of_cifar10(cifar10_folder, tmp_path):
    train_one_round("cifar10-0.5", {"data.options": FEW}, cifar10_folder, tmp_path)


def train_one_round(preset, changes, root, tmp_path):
    small = {
        "data.root": str(root),
        "data.cache": str(tmp_path / "cache"),
        "data.image_size": 32,
        "model.backbone": "resnet-small",
        "model.pretrained": "none",
        "train.rounds": 1,
        "train.lr": 1e-3,
        "threads": 1,
        "device": "cpu",
    }
    run = train(load_config(preset, changes | small), tmp_path / "run")
    result = Run(run.folder).results["last"]
    assert 0 < result["test"]["macro_auc"] < 1  # one round from scratch: read and judged, not yet good
    assert np.isfinite(list(run.history[0]["losses"].values())).all()
    return run.federation


def assert_patients_stay_together(federation):
    sides = {"test": set(federation.dataset.test.groups)}
    for part, share in (("train", federation.train), ("val", federation.val)):
        clients = [set(share.split.groups[share.client(k)[0]]) for k in range(len(share.partition.clients))]
        sides[part] = set().union(*clients)
        assert sum(map(len, clients)) == len(sides[part])  # no patient at two clients
        assert len(sides[part]) > 50
    assert not sides["train"] & sides["val"]
    assert not (sides["train"] | sides["val"]) & sides["test"]
