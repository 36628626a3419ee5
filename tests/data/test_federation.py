from dataclasses import replace

import numpy as np
import pytest

from fednca.base.errors import FedncaError
from fednca.data.federation import Federation, build_federation, hold_out
from fednca.data.partition import ELSEWHERE, Partition, dirichlet_presence
from fednca.data.types import Dataset, Split

SETTINGS = {"clients": 4, "beta": 1.0, "gamma": 0.75, "seed": 0, "min_samples": 5}


def make_split(seed: int, images: int, grouped: bool = False) -> Split:
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, 4)) < 0.35).astype(np.int8)
    pixels = rng.integers(0, 256, (images, 4, 4, 3), dtype=np.uint8)
    return Split(pixels, labels, rng.integers(0, images // 4, images) if grouped else None)


def make_dataset(*, val: bool, grouped: bool = False) -> Dataset:
    official = make_split(1, 120, grouped) if val else None
    return Dataset("toy", ("a", "b", "c", "d"), make_split(0, 400, grouped), official, make_split(2, 80))


def assert_same(mine: Federation, other: Federation) -> None:
    for share, twin in ((mine.train, other.train), (mine.val, other.val)):
        np.testing.assert_array_equal(share.rows, twin.rows)
        for k in range(SETTINGS["clients"]):
            for array, same in zip(share.client(k), twin.client(k), strict=True):
                np.testing.assert_array_equal(array, same)


def test_an_official_validation_split_is_dealt_by_the_training_classes_and_shares():
    federation = build_federation(make_dataset(val=True), **SETTINGS)
    train, val = federation.train.partition, federation.val.partition
    assert federation.val.split is federation.dataset.val
    np.testing.assert_array_equal(train.classes, val.classes)
    np.testing.assert_array_equal(train.proportions, val.proportions)
    assert len(federation.train.rows) == 400
    for k in range(4):
        rows, labels = federation.val.client(k)
        np.testing.assert_array_equal(labels, federation.dataset.val.labels[rows])
        assert not labels[:, ~train.classes[k]].any()


@pytest.mark.parametrize("grouped", [False, True])
def test_without_one_a_tenth_of_train_is_held_out_before_dealing(grouped):
    federation = build_federation(make_dataset(val=False, grouped=grouped), **SETTINGS)
    train, val = federation.train, federation.val
    assert val.split is train.split
    assert np.array_equal(np.sort(np.concatenate([train.rows, val.rows])), np.arange(400))
    held = [row for k in range(4) for row in train.client(k)[0]]
    assert not set(held) & set(val.rows.tolist())
    if grouped:
        assert 25 < len(val.rows) <= 40
        assert not set(train.split.groups[train.rows]) & set(train.split.groups[val.rows])
    else:
        assert len(val.rows) == 40


def test_everything_includes_what_no_client_holds_and_union_does_not():
    federation = build_federation(make_dataset(val=False), **SETTINGS)
    left_out = np.concatenate(list(federation.train.partition.left_out.values()))
    assert len(left_out) > 0
    rows, labels = federation.train.everything()
    np.testing.assert_array_equal(labels, federation.dataset.train.labels[rows])
    held, _ = federation.train.union()
    assert set(rows) - set(held) == set(federation.train.rows[left_out])
    assert len(rows) == len(held) + len(left_out)


def test_labels_are_as_the_client_sees_them():
    federation = build_federation(make_dataset(val=False), **SETTINGS, unmatched="loss-mask")
    rows, labels = federation.train.union()
    truth = federation.dataset.train.labels[rows]
    assert (labels == -1).any()
    np.testing.assert_array_equal(labels != truth, (labels == -1) & (truth == 1))


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_building_again_and_loading_give_the_same_federation(tmp_path, val, grouped):
    dataset = make_dataset(val=val, grouped=grouped)
    federation = build_federation(dataset, **SETTINGS)
    federation.save(tmp_path / "partition.npz")
    assert_same(federation, build_federation(dataset, **SETTINGS))
    assert_same(federation, Federation.load(tmp_path / "partition.npz", dataset))


def test_a_partition_comes_back_whole_from_its_arrays():
    labels = (np.random.default_rng(3).random((500, 8)) < 0.25).astype(np.int8)
    partition = dirichlet_presence(labels, 4, 0.5, 0.6, 0, groups=np.arange(500) // 2)
    back = Partition.from_arrays(partition.to_arrays())
    assert len(partition.left_out[ELSEWHERE]) > 0
    assert back.unmatched == partition.unmatched
    assert list(back.left_out) == list(partition.left_out)
    np.testing.assert_array_equal(back.classes, partition.classes)
    np.testing.assert_array_equal(back.proportions, partition.proportions)
    pairs = [*zip(back.clients, partition.clients, strict=True)]
    for mine, own in [*pairs, *zip(back.left_out.values(), partition.left_out.values(), strict=True)]:
        np.testing.assert_array_equal(mine, own)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_archive_is_named(tmp_path, content):
    path = tmp_path / "partition.npz"
    path.write_bytes(content)
    with pytest.raises(FedncaError, match=r"partition\.npz' cannot be read"):
        Federation.load(path, make_dataset(val=False))


def test_an_archive_of_something_else_is_named(tmp_path):
    np.savez(tmp_path / "images.npz", train_images=np.zeros(3))
    with pytest.raises(FedncaError, match=r"images\.npz' has no array 'fingerprint'"):
        Federation.load(tmp_path / "images.npz", make_dataset(val=False))


def test_a_federation_of_other_labels_is_refused(tmp_path):
    dataset = make_dataset(val=True)
    build_federation(dataset, **SETTINGS).save(tmp_path / "partition.npz")
    changed = dataset.train.labels.copy()
    changed[0, 0] ^= 1
    other = Dataset("toy", dataset.classes, Split(dataset.train.images, changed), dataset.val, dataset.test)
    with pytest.raises(FedncaError, match="was made for other labels than those of toy"):
        Federation.load(tmp_path / "partition.npz", other)


def test_other_test_labels_are_refused_too_but_where_they_were_not_written_down(tmp_path):
    dataset, path = make_dataset(val=True), tmp_path / "partition.npz"
    build_federation(dataset, **SETTINGS).save(path)
    other = replace(dataset, test=Split(dataset.test.images, 1 - dataset.test.labels))
    with pytest.raises(FedncaError, match="was made for other labels than those of toy"):
        Federation.load(path, other)
    with np.load(path, allow_pickle=False) as arrays:
        older = {name: array for name, array in arrays.items() if name != "test/fingerprint"}
    np.savez(path, **older)
    Federation.load(path, other)


def test_a_file_that_lacks_an_array_is_named_whatever_else_it_has(tmp_path):
    dataset, path = make_dataset(val=True), tmp_path / "partition.npz"
    build_federation(dataset, **SETTINGS).save(path)
    with np.load(path, allow_pickle=False) as arrays:
        damaged = {name: array for name, array in arrays.items() if name != "train/owner"}
    np.savez(path, **damaged, **{"train/note": np.zeros(1)})
    with pytest.raises(FedncaError, match="is damaged: it lacks arrays of the train images"):
        Federation.load(path, dataset)


def test_an_empty_validation_split_stays_empty():
    dataset = make_dataset(val=True)
    empty = Split(dataset.train.images[:0], dataset.train.labels[:0])
    federation = build_federation(Dataset("toy", dataset.classes, dataset.train, empty, dataset.test), **SETTINGS)
    assert federation.val.split is empty
    assert len(federation.val.union()[0]) == 0


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(FedncaError, match=f"val_fraction is {fraction}"):
        hold_out(make_split(0, 20), fraction, 0)


def test_a_hold_out_is_never_empty():
    split = make_split(0, 20)
    stay, aside = hold_out(Split(split.images, split.labels, np.arange(20) // 10), 0.1, 0)
    assert len(aside) == len(stay) == 10


@pytest.mark.parametrize("val", [True, False])
def test_the_partition_seed_decides_what_is_held_out_and_who_gets_what(val):
    one, other = (build_federation(make_dataset(val=val), **SETTINGS | {"seed": seed}) for seed in (0, 1))
    assert not np.array_equal(one.train.partition.proportions, other.train.partition.proportions)
    assert val or not np.array_equal(one.val.rows, other.val.rows)


def test_validation_images_are_masked_as_training_images_are():
    _, labels = build_federation(make_dataset(val=True), **SETTINGS, unmatched="loss-mask").val.union()
    assert len(labels) == 120
    assert (labels == -1).any()


def test_groups_of_validation_images_are_not_split():
    federation = build_federation(make_dataset(val=True, grouped=True), **SETTINGS)
    homes = [set(federation.dataset.val.groups[federation.val.client(k)[0]]) for k in range(4)]
    assert sum(map(len, homes)) == len(set.union(*homes))


@pytest.mark.parametrize("change", ["groups", "classes"])
def test_other_groups_or_classes_are_refused(tmp_path, change):
    dataset = make_dataset(val=True, grouped=True)
    build_federation(dataset, **SETTINGS).save(tmp_path / "partition.npz")
    train = dataset.train
    other = {
        "groups": replace(dataset, train=Split(train.images, train.labels, train.groups[::-1].copy())),
        "classes": replace(dataset, classes=("b", "a", "c", "d")),
    }
    with pytest.raises(FedncaError, match="was made for other labels"):
        Federation.load(tmp_path / "partition.npz", other[change])


def test_validation_images_of_a_site_know_the_classes_of_its_training_images():
    dataset = make_dataset(val=True)
    own = {
        part: replace(split, sites=np.arange(len(split)) % 3)
        for part, split in (("train", dataset.train), ("val", dataset.val))
    }
    own["val"].labels[own["val"].sites == 0, 0] = 0  # of these, none has the class
    federation = build_federation(replace(dataset, **own, sites=("n", "e", "s")), **SETTINGS, kind="natural")
    np.testing.assert_array_equal(federation.val.partition.classes, federation.train.partition.classes)
