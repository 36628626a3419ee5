from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny

from fednca.callbacks import Callback
from fednca.data.federation import Federation, build_federation, hold_out, without_validation
from fednca.data.partition import natural_sites, summary
from fednca.data.types import Dataset, Split
from fednca.errors import FedncaError
from fednca.runs import train

SITES = ("north", "east", "south")
SETTINGS = {"kind": "natural", "clients": 99, "beta": 0.5, "gamma": 0.01, "seed": 0, "min_samples": 10}


def make_split(seed, images, *, sites=True, grouped=False):
    """Draw a split whose site k has no positive of class k."""
    rng = np.random.default_rng(seed)
    where = rng.choice(3, images, p=[0.5, 0.3, 0.2])
    labels = (rng.random((images, 4)) < 0.4).astype(np.int8)
    labels[np.arange(images), where] = rng.integers(-1, 1, images)
    groups = rng.integers(0, images // 5, images) if grouped else None
    return Split(np.zeros((images, 1, 1, 3), np.uint8), labels, groups, where if sites else None)


def make_dataset(*, val=None, **options):
    return Dataset("toy", ("a", "b", "c", "d"), make_split(0, 400, **options), val, make_split(2, 30), SITES)


def one_patient_in_the_south():
    dataset = make_dataset()
    train = dataset.train
    groups = np.where(train.sites == 2, 400, np.arange(400))
    return replace(dataset, train=replace(train, groups=groups))


def test_a_client_is_a_site_with_all_its_images():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, -1], [1, 0, 0]], np.int8)
    partition = natural_sites(labels, np.array([1, 0, 1, 1]), 2)
    assert [rows.tolist() for rows in partition.clients] == [[1], [0, 2, 3]]
    assert partition.classes.tolist() == [[True, True, False], [True, False, False]]
    # Class 0: one positive at site 0, two at site 1; class 1: all at site 0; class 2: nowhere.
    np.testing.assert_allclose(partition.proportions, [[1 / 3, 2 / 3], [1, 0], [0, 0]])
    assert partition.left_out == {}
    assert summary(partition, labels).tolist() == [[1, 1, 0], [2, 0, 0]]


def test_the_federation_has_the_sites_as_its_clients_whatever_beta_gamma_and_clients():
    federation = build_federation(make_dataset(), **SETTINGS)
    train = federation.dataset.train
    assert len(federation.train.partition.clients) == 3
    for share in (federation.train, federation.val):
        for k in range(3):
            rows, labels = share.client(k)
            assert set(train.sites[rows]) == {k}
            np.testing.assert_array_equal(labels, train.labels[rows])
    everything = np.concatenate([federation.train.union()[0], federation.val.union()[0]])
    np.testing.assert_array_equal(np.sort(everything), np.arange(400))
    np.testing.assert_array_equal(federation.train.partition.classes, ~np.eye(3, 4, dtype=bool))


def test_every_site_holds_out_a_share_of_its_own():
    split = make_split(0, 400)
    _, aside = hold_out(split, 0.1, 0, by_site=True)
    expected = [round(0.1 * n) for n in np.bincount(split.sites)]
    assert np.bincount(split.sites[aside]).tolist() == expected


@pytest.mark.parametrize("fraction", [0.1, 0.9])
def test_a_site_of_one_group_keeps_it_and_others_keep_one_at_least(fraction):
    sites, groups = np.array([0, 0, 0, 1, 2, 2, 2, 2]), np.array([0, 0, 0, 1, 2, 2, 3, 3])
    split = Split(np.zeros((8, 1, 1, 3), np.uint8), np.ones((8, 1), np.int8), groups, sites)
    stay, aside = hold_out(split, fraction, 0, by_site=True)
    assert np.bincount(sites[stay], minlength=3).tolist() == [3, 1, 2]
    assert len(np.unique(groups[aside])) == 1
    assert len(hold_out(replace(split, groups=np.zeros(8, np.int64)), fraction, 0)[1]) == 0


def test_sites_that_hold_out_nothing_are_told():
    federation = build_federation(one_patient_in_the_south(), **SETTINGS | {"min_samples": 1})
    assert without_validation(federation) == ["south"]
    assert len(federation.train.client(2)[0]) == np.count_nonzero(federation.dataset.train.sites == 2)


def test_a_run_trains_and_calibrates_with_a_site_without_validation_images(tmp_path, monkeypatch):
    monkeypatch.setattr("fednca.setup.read_dataset", lambda config: one_patient_in_the_south())
    told = []
    view = Callback()
    view.on_note = told.append
    changes = {"data__image_size": 16, "partition__kind": "natural", "calibrate__min_count": 2, "train__rounds": 1}
    run = train(tiny(**changes), tmp_path / "run", [view])
    assert told[0] == "sites without validation images: south"
    assert len(run.results["val"]["calibrated"]["thresholds"]) == 4


def test_groups_stay_whole_even_across_sites():
    federation = build_federation(make_dataset(grouped=True), **SETTINGS)
    groups = federation.dataset.train.groups
    assert not set(groups[federation.train.rows]) & set(groups[federation.val.rows])
    assert 20 < len(federation.val.rows) <= 40


def test_an_official_validation_split_stays_at_its_sites():
    federation = build_federation(make_dataset(val=make_split(1, 100)), **SETTINGS)
    val = federation.dataset.val
    for k in range(3):
        np.testing.assert_array_equal(federation.val.client(k)[0], np.flatnonzero(val.sites == k))
    np.testing.assert_array_equal(federation.val.partition.classes, federation.train.partition.classes)


def test_a_validation_split_without_sites_is_dealt_by_the_sites_classes():
    federation = build_federation(make_dataset(val=make_split(1, 100, sites=False)), **SETTINGS)
    classes = federation.train.partition.classes
    sizes = [len(rows) for rows in federation.val.partition.clients]
    assert min(sizes) > 0
    for k in range(3):
        assert not (federation.val.client(k)[1][:, ~classes[k]] == 1).any()


def test_a_saved_federation_comes_back_and_other_sites_are_refused(tmp_path):
    dataset = make_dataset()
    federation = build_federation(dataset, **SETTINGS)
    federation.save(tmp_path / "deal.npz")
    loaded = Federation.load(tmp_path / "deal.npz", dataset)
    assert loaded.train.partition.left_out == {}
    for k in range(3):
        np.testing.assert_array_equal(loaded.train.client(k)[0], federation.train.client(k)[0])
        np.testing.assert_array_equal(loaded.val.client(k)[1], federation.val.client(k)[1])
    train = dataset.train
    moved = Split(train.images, train.labels, None, (train.sites + 1) % 3)
    with pytest.raises(FedncaError, match="was made for other labels"):
        Federation.load(tmp_path / "deal.npz", Dataset("toy", dataset.classes, moved, None, dataset.test, SITES))


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ({"sites": False}, {}, "toy does not say which site an image comes from"),
        ({}, {"min_samples": 100}, r"site 'south' has \d+ training images, but min_samples is 100; lower"),
        ({}, {"kind": "nature"}, "partition kind 'nature' is not known; did you mean 'natural'"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, changes, sentence):
    with pytest.raises(FedncaError, match=sentence):
        build_federation(make_dataset(**options), **SETTINGS | changes)


def test_a_site_without_images_is_told_so():
    dataset = replace(make_dataset(), sites=(*SITES, "west"))
    with pytest.raises(FedncaError, match=r"'west' has no training images \(all are unreadable, for validation"):
        build_federation(dataset, **SETTINGS)


@pytest.mark.parametrize("site", [-1, 3])
def test_a_site_without_a_name_is_refused(site):
    with pytest.raises(FedncaError, match=r"sites run from .* give numbers from 0 to 2"):
        natural_sites(np.zeros((2, 4), np.int8), np.array([1, site]), 3)
