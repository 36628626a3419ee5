import subprocess
import sys

import numpy as np
import pytest
from helpers import composite_counts
from pydantic import ValidationError
from sklearn.datasets import load_digits

from fednca.base.errors import FedncaError
from fednca.data.sources import get_source, source_names
from fednca.data.sources.digits import CLASSES, Options, load, split_rows


def test_a_listing_imports_neither_the_sources_nor_torch():
    code = (
        "import sys; from fednca.data.sources import source_names; names = source_names(); "
        "loaded = [m for m in sys.modules if m in ('torch', 'sklearn') or m.startswith('fednca.data.sources.')]; "
        "sys.exit(f'{names} {loaded}' if loaded or 'digits' not in names else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", source_names())
def test_every_source_says_what_it_is(name):
    source = get_source(name)
    assert source.SUMMARY
    assert source.LICENCE
    for field in source.Options.model_fields.values():
        assert field.description


def test_an_unknown_name_is_answered_with_a_near_one():
    with pytest.raises(FedncaError, match="dataset 'digit' is not known; did you mean 'digits'"):
        get_source("digit")


def test_digits_come_in_the_sizes_asked_for():
    dataset = load(Options(), None)
    assert dataset.val is not None
    assert dataset.train.images.shape == (2000, 16, 16, 3)
    for split, singles, pairs in ((dataset.train, 110, 20), (dataset.val, 22, 4), (dataset.test, 35, 10)):
        total, prevalence = composite_counts([0] * 10, singles, pairs)
        assert len(split) == total
        np.testing.assert_allclose((split.labels == 1).mean(axis=0), prevalence)


def test_digits_use_the_whole_range_of_brightness():
    dataset = load(Options(train_singles=1, train_pairs=0), None)
    pieces = set(np.unique(dataset.test.images).tolist())
    assert pieces == {round(level * 255 / 16) for level in range(17)}


@pytest.mark.parametrize("seed", [0, 1])
def test_digits_split_every_class_and_share_no_source_image(seed):
    target = load_digits().target
    rows = split_rows(target, seed)
    assert np.array_equal(np.sort(np.concatenate(list(rows.values()))), np.arange(len(target)))
    for part, share in (("train", 0.65), ("val", 0.13), ("test", 0.22)):
        per_class = np.bincount(target[rows[part]], minlength=10) / np.bincount(target)
        np.testing.assert_allclose(per_class, share, atol=2 / 174)


def test_single_digits_of_the_test_split_occur_in_no_training_composite():
    dataset = load(Options(), None)

    def pieces(split):
        """Cut single digits out of their canvases; the corner and shift do not matter."""
        alone = split.images[split.labels.sum(axis=1) == 1, ..., 0]
        return {image[y : y + 8, x : x + 8].tobytes() for image in alone for y, x in corners(image)}

    def corners(image):
        places = [(s, s) for s in (0, 1, 8, 7)]
        return [(y, x) for y, x in places if image[y : y + 8, x : x + 8].sum(dtype=int) == image.sum(dtype=int)]

    source = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    known = {image.tobytes() for image in source}
    train, test = pieces(dataset.train) & known, pieces(dataset.test) & known
    assert len(train) == 1100
    assert len(test) == 350
    assert not train & test


def test_digits_depend_on_their_seed_alone():
    first, again, other = (load(Options(seed=seed), None) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.train.images, again.train.images)
    np.testing.assert_array_equal(first.test.images, again.test.images)
    assert not np.array_equal(first.train.images, other.train.images)


def test_digits_refuse_impossible_counts():
    with pytest.raises(ValidationError, match="train_pairs"):
        Options(train_pairs=-1)
    with pytest.raises(FedncaError, match="source images for 200 singles"):
        load(Options(train_singles=200), None)


def test_digits_name_ten_classes():
    assert len(CLASSES) == len(set(CLASSES)) == len(np.unique(load_digits().target))
