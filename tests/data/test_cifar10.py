from pathlib import Path

import numpy as np
import pytest
from helpers import composite_counts

from fednca.base.errors import FedncaError
from fednca.data.sources.cifar10 import (
    CLASSES,
    TEST_FILES,
    TRAIN_FILES,
    Options,
    load,
    missing,
    prepare,
    read_batches,
    set_aside,
)

SMALL = Options(train_singles=18, train_pairs=2, val_singles=2, val_pairs=1, test_singles=4, test_pairs=1)


def write_batches(folder: Path, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write 40 images per file, 4 of each class, pixel by pixel as the format's description has it."""
    folder.mkdir(parents=True)
    rng, written = np.random.default_rng(seed), {}
    for name in (*TRAIN_FILES, *TEST_FILES):
        images = rng.integers(1, 256, (40, 32, 32, 3), dtype=np.uint8)
        labels = rng.permutation(np.arange(40) % 10).astype(np.uint8)
        with (folder / name).open("wb") as file:
            for image, label in zip(images, labels, strict=True):
                file.write(bytes([label]))
                for channel in range(3):
                    file.write(image[:, :, channel].tobytes())
        written[name] = images, labels
    return written


@pytest.fixture
def root(tmp_path):
    write_batches(tmp_path / "cifar-10-batches-bin")
    return tmp_path


def singles(split) -> set[bytes]:
    """Cut single images out of their canvases; their pixels are never black."""
    cut = set()
    for canvas in split.images[split.labels.sum(axis=1) == 1]:
        y, x = (axis.min() for axis in np.nonzero(canvas[..., 0]))
        cut.add(canvas[y : y + 32, x : x + 32].tobytes())
    return cut


@pytest.mark.parametrize("below", ["cifar-10-batches-bin", "."])
def test_images_and_classes_are_those_written(tmp_path, below):
    folder = tmp_path / "root" / below
    written = write_batches(folder)
    images, labels = read_batches(folder, TRAIN_FILES)
    np.testing.assert_array_equal(images, np.concatenate([written[name][0] for name in TRAIN_FILES]))
    np.testing.assert_array_equal(labels, np.concatenate([written[name][1] for name in TRAIN_FILES]))
    assert missing(tmp_path / "root") == []
    assert singles(load(SMALL, tmp_path / "root").test) == {image.tobytes() for image in written["test_batch.bin"][0]}


def test_splits_share_no_source_image_and_have_the_sizes_asked_for(root):
    dataset = load(SMALL, root)
    for split, alone, pairs in ((dataset.train, 18, 2), (dataset.val, 2, 1), (dataset.test, 4, 1)):
        total, prevalence = composite_counts([0] * 10, alone, pairs)
        assert split.images.shape == (total, 64, 64, 3)
        np.testing.assert_allclose(split.labels.mean(axis=0), prevalence)
    sources = [singles(split) for split in (dataset.train, dataset.val, dataset.test)]
    assert [len(cut) for cut in sources] == [180, 20, 40]
    assert len(set.union(*sources)) == 240


def test_the_defaults_make_the_published_sizes():
    options = Options()
    assert composite_counts([0] * 10, options.train_singles, options.train_pairs)[0] == 40_000
    assert composite_counts([0] * 10, options.val_singles, options.val_pairs)[0] == 4_000
    assert composite_counts([0] * 10, options.test_singles, options.test_pairs)[0] == 10_250


def test_a_tenth_of_every_class_is_set_aside_by_the_seed():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), np.arange(100, 200, 10)))
    kept, aside = set_aside(labels, 3)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, aside])), np.arange(len(labels)))
    np.testing.assert_array_equal(np.bincount(labels[aside]), np.arange(10, 20))
    np.testing.assert_array_equal(set_aside(labels, 3)[1], aside)
    assert not np.array_equal(set_aside(labels, 4)[1], aside)


def test_a_missing_file_is_named_with_its_archive(root):
    path = root / "cifar-10-batches-bin/data_batch_3.bin"
    path.unlink()
    assert missing(root) == [f"'{path}' (of cifar-10-binary.tar.gz)"]
    for act in (lambda: load(SMALL, root), lambda: prepare(root, print)):
        with pytest.raises(FedncaError, match=r"lacks '.*data_batch_3\.bin' \(of cifar-10-binary\.tar\.gz\); put it"):
            act()


def test_the_pickled_version_is_never_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(
        FedncaError, match=r"of cifar-10-binary\.tar\.gz; the pickled cifar-10-batches-py is never read"
    ):
        load(SMALL, tmp_path)


def test_without_a_folder_the_setting_is_named():
    with pytest.raises(FedncaError, match=r"cifar10 is read from files; set data\.root"):
        load(SMALL, None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content[:-1], r"test_batch\.bin' has 122919 bytes, not a multiple of 3073"),
        (lambda content: b"", r"test_batch\.bin' has 0 bytes"),
        (lambda content: content[:3073] + b"\x0b" + content[3074:], r"test_batch\.bin' record 1 has class 11, not 0"),
    ],
)
def test_a_damaged_file_is_named(root, change, sentence):
    path = root / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FedncaError, match=sentence):
        load(SMALL, root)


@pytest.mark.cifar10
def test_the_real_files_have_the_known_means_and_class_counts(cifar10_folder):
    """The channel means that training recipes for CIFAR-10 are published with."""
    folder = cifar10_folder if (cifar10_folder / "test_batch.bin").exists() else cifar10_folder / "cifar-10-batches-bin"
    images, labels = read_batches(folder, TRAIN_FILES)
    np.testing.assert_allclose(images.mean(axis=(0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=5e-5)
    assert np.bincount(labels).tolist() == [5000] * 10
    assert [CLASSES[label] for label in labels[:3]] == ["frog", "truck", "truck"]
    assert np.bincount(read_batches(folder, TEST_FILES)[1]).tolist() == [1000] * 10


@pytest.mark.cifar10
def test_the_real_files_are_composed(cifar10_folder):
    dataset = load(Options(), cifar10_folder)
    assert [len(split) for split in (dataset.train, dataset.val, dataset.test)] == [40_000, 4_000, 10_250]
    assert dataset.train.images.shape[1:] == (64, 64, 3)
    for split in (dataset.train, dataset.val, dataset.test):
        assert len(np.unique(split.labels.sum(axis=0))) == 1
