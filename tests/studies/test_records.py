"""What a record keeps of features, against scikit-learn and one image at a time."""

import json

import numpy as np
import pytest
import torch
from plan import DRAWS, Entry, chosen_draw
from reading import SETTING
from records import absent_labels, write_record
from sklearn.metrics import silhouette_score

from fednca.engines.workplace import build_store


def test_silhouettes_are_those_of_features_taken_one_image_at_a_time(tiny_run, real_record):
    test, model = tiny_run.federation.dataset.test, tiny_run.model()
    labels, store = test.labels, build_store(tiny_run.config, test.images, torch.device("cpu"))
    with torch.no_grad():
        features = [model(store.gather(torch.tensor([row]))).features[0] for row in range(len(labels))]
    features = torch.stack(features).double().numpy()
    assert features.shape[:2] == labels.shape  # a feature per class
    found = real_record["features"]["silhouette"]
    for name, marked in (("class", labels), ("class, absent", absent_labels(labels))):
        taken = [(features[i, c], c) for i in range(len(labels)) for c in np.flatnonzero(marked[i] == 1)]
        own, classes = zip(*taken, strict=True)
        assert found[name] == pytest.approx(silhouette_score(np.stack(own), classes, metric="cosine"), abs=2e-5)
    assert real_record["features"]["classes"] == [c for row in labels for c in np.flatnonzero(row == 1)]


def test_features_are_mapped_on_the_draw_taken_alone(tiny_run, real_record, tried_draws, tmp_path):
    for path, record in tried_draws.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(record), encoding="utf-8")
    taken = chosen_draw(SETTING, tried_draws)
    kept = {}
    for draw in (taken, next(draw for draw in DRAWS if draw != taken)):
        entry = Entry(SETTING, "fedavg", draw, 0)
        write_record(entry, tiny_run, "0123456789abcdef", tmp_path)
        kept[draw] = json.loads((tmp_path / entry.path).read_text(encoding="utf-8"))["features"]
    mapped = kept.pop(taken)
    assert mapped == real_record["features"]
    (other,) = kept.values()
    assert other == {name: mapped[name] for name in ("silhouette", "mean_cosines", "raw_cosines")}


def test_absent_classes_are_as_many_as_those_shown():
    labels = (np.random.default_rng(1).random((200, 7)) < 0.3).astype(np.int8)
    labels[0] = 1  # shows all
    absent = absent_labels(labels)
    assert not (absent & labels).any()
    shown = labels.sum(axis=1)
    np.testing.assert_array_equal(absent.sum(axis=1), np.minimum(shown, 7 - shown))
    assert (absent.sum(axis=0) > 0).all()
