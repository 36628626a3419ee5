"""Files of arrays: what comes back, and what a damaged one says."""

import numpy as np
import pytest

from fednca.base.arrays import read_arrays, write_arrays
from fednca.base.errors import FedncaError


def test_arrays_come_back_under_their_names(tmp_path):
    arrays = {"a": np.arange(6).reshape(2, 3), "b/c": np.array(["süd", "nord"])}
    write_arrays(tmp_path / "odd name", arrays)
    found = read_arrays(tmp_path / "odd name", "")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_single_array_goes_by_the_files_name(tmp_path):
    np.save(tmp_path / "table.npy", np.eye(2))
    np.testing.assert_array_equal(read_arrays(tmp_path / "table.npy", "")["table"], np.eye(2))


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_a_damaged_file_is_one_sentence(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    if suffix == ".npz":
        write_arrays(path, {"first": np.arange(40), "second": np.ones((3, 4))})
    else:
        np.save(path, np.arange(40))
    content, refused = path.read_bytes(), set()
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        for place in rng.integers(len(damaged), size=4):
            damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            read_arrays(path, "download it again")
        except FedncaError as error:
            refused.add(str(error))
    assert len(refused) > 5
    assert all(text.startswith(f"'{path}' cannot be read (") for text in refused)
    assert all(text.endswith("); download it again") for text in refused)


def test_no_object_is_unpickled(tmp_path):
    np.savez(tmp_path / "file.npz", words=np.array([{}], object))
    with pytest.raises(FedncaError, match=r"cannot be read \(Object arrays cannot be loaded.*\); other"):
        read_arrays(tmp_path / "file.npz", "other")
