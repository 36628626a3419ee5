"""Partitions on disk: what comes back, and what is refused."""

import numpy as np
import pytest

from fednca.base.errors import FedncaError
from fednca.data.partition import ELSEWHERE, dirichlet_presence, load_partition, save


def test_a_saved_partition_comes_back_the_same(tmp_path):
    labels = (np.random.default_rng(3).random((500, 8)) < 0.25).astype(np.int8)
    groups = np.arange(500) // 2
    partition = dirichlet_presence(labels, 4, 0.5, 0.6, 0, groups=groups)
    save(partition, tmp_path / "deal")
    loaded = load_partition(tmp_path / "deal")
    assert len(partition.left_out[ELSEWHERE]) > 0
    assert loaded.unmatched == partition.unmatched
    assert list(loaded.left_out) == list(partition.left_out)
    np.testing.assert_array_equal(loaded.classes, partition.classes)
    np.testing.assert_array_equal(loaded.proportions, partition.proportions)
    pairs = [*zip(loaded.clients, partition.clients, strict=True)]
    for mine, saved in [*pairs, *zip(loaded.left_out.values(), partition.left_out.values(), strict=True)]:
        np.testing.assert_array_equal(mine, saved)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_partition_is_named(tmp_path, content):
    path = tmp_path / "deal.npz"
    path.write_bytes(content)
    with pytest.raises(FedncaError, match=r"deal\.npz' cannot be read"):
        load_partition(path)


def test_an_archive_of_something_else_is_named(tmp_path):
    np.savez(tmp_path / "images.npz", train_images=np.zeros(3))
    with pytest.raises(FedncaError, match=r"images\.npz' has no array 'owner'"):
        load_partition(tmp_path / "images.npz")
