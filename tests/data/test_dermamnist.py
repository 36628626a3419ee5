import hashlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fednca.data.sources import dermamnist
from fednca.data.sources.dermamnist import CLASSES, Options, load, missing, prepare
from fednca.errors import FedncaError

COUNTS = {"train": 4, "val": 2, "test": 3}  # images per class
SMALL = Options(train_pairs=3, val_pairs=1, test_pairs=2)


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def make_arrays() -> dict[str, np.ndarray]:
    rng, arrays = np.random.default_rng(0), {}
    for part, count in COUNTS.items():
        arrays[f"{part}_images"] = rng.integers(1, 256, (7 * count, 28, 28, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = rng.permutation(np.arange(7 * count, dtype=np.uint8) % 7)[:, None]
    return arrays


def test_every_image_is_a_single_of_its_class_once(tmp_path):
    arrays = make_arrays()
    np.savez(tmp_path / "dermamnist.npz", **arrays)
    dataset = load(SMALL, tmp_path)
    assert dataset.classes == CLASSES
    splits = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    for part, pairs in (("train", 3), ("val", 1), ("test", 2)):
        split, singles = splits[part], 7 * COUNTS[part]
        assert split.images.shape == (singles + 21 * pairs, 56, 56, 3)
        np.testing.assert_array_equal(split.labels[:singles], np.eye(7, dtype=int)[arrays[f"{part}_labels"][:, 0]])
        sums = split.images[:singles].sum(axis=(1, 2, 3), dtype=int)
        np.testing.assert_array_equal(sums, arrays[f"{part}_images"].sum(axis=(1, 2, 3), dtype=int))
        np.testing.assert_array_equal(split.labels[singles:].sum(axis=1), 2)


def test_the_seed_decides_the_composites(tmp_path):
    np.savez(tmp_path / "dermamnist.npz", **make_arrays())
    first, again, other = (load(Options(seed=seed), tmp_path).train.images for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"val_labels": None}, r"dermamnist\.npz' has no array 'val_labels'"),
        ({"test_images": np.zeros((21, 28, 28), np.uint8)}, r"test_images of '.*npz' are uint8 \(21, 28, 28\)"),
        (
            {"train_labels": np.full((28, 1), 7, np.uint8)},
            r"train_labels of '.*npz' has 7 in row 0, but classes are 0 to 6",
        ),
        ({"train_labels": np.zeros((27, 1), np.uint8)}, r"train_images of '.*npz' are .* for 27 labels"),
        ({"val_images": np.array([{}], object)}, r"dermamnist\.npz' cannot be read .*; download it again"),
    ],
)
def test_an_archive_of_something_else_is_named(tmp_path, changes, sentence):
    arrays = {name: array for name, array in (make_arrays() | changes).items() if array is not None}
    np.savez(tmp_path / "dermamnist.npz", **arrays)
    with pytest.raises(FedncaError, match=sentence):
        load(SMALL, tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not an archive"])
def test_a_file_that_is_no_archive_is_named(tmp_path, content):
    (tmp_path / "dermamnist.npz").write_bytes(content)
    with pytest.raises(FedncaError, match=r"dermamnist\.npz' cannot be read .*; download it again"):
        load(SMALL, tmp_path)


def test_a_single_array_is_no_archive(tmp_path):
    with (tmp_path / "dermamnist.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(FedncaError, match=r"dermamnist\.npz' has no array 'train_images'"):
        load(SMALL, tmp_path)


def test_a_missing_file_is_named(tmp_path):
    assert missing(tmp_path) == [f"'{tmp_path / 'dermamnist.npz'}' (MedMNIST's file of 28-pixel images)"]
    with pytest.raises(FedncaError, match=r"dermamnist lacks '.*dermamnist\.npz'"):
        load(SMALL, tmp_path)


def test_without_medmnist_the_file_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "medmnist", None)
    monkeypatch.setitem(sys.modules, "medmnist.info", None)
    with pytest.raises(FedncaError, match=r"needs the package 'medmnist': .* put MedMNIST's .*npz at '.*npz' by hand"):
        prepare(tmp_path, silent)


def test_with_medmnist_its_address_and_checksum_are_used(tmp_path, monkeypatch):
    asked = []
    facts = {"url": "https://example.org/dermamnist.npz", "MD5": hashlib.md5(b"").hexdigest()}
    monkeypatch.setitem(sys.modules, "medmnist", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "medmnist.info", SimpleNamespace(INFO={"dermamnist": facts}))
    monkeypatch.setattr(
        dermamnist, "download", lambda url, path, *, checksum, progress: asked.append((url, path, checksum))
    )
    prepare(tmp_path, silent)
    assert asked == [(facts["url"], tmp_path / "dermamnist.npz", f"md5:{facts['MD5']}")]
    (tmp_path / "dermamnist.npz").touch()
    prepare(tmp_path, silent)
    assert len(asked) == 1


@pytest.mark.data
def test_the_real_file_gives_the_published_sizes_and_prevalences(data_folder):
    dataset = load(Options(), data_folder)
    assert [len(split) for split in (dataset.train, dataset.val, dataset.test)] == [8057, 1213, 2425]
    train, test = (100 * split.labels.mean(axis=0) for split in (dataset.train, dataset.test))
    assert dataset.classes[train.argmax()] == dataset.classes[test.argmax()] == "melanocytic nevi"
    assert [round(train.max(), 2), round(test.max(), 2), round(test.min(), 2)] == [61.97, 60.25, 5.90]
    assert dataset.classes[test.argmin()] == "dermatofibroma"
    assert dataset.test.images.shape == (2425, 56, 56, 3)
