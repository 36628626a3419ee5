"""Tensors as Flower's records: nothing changes on the way, and what is no tensor does not get in."""

import io
import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from fednca.base.errors import FedncaError
from fednca.base.tensors import Packed
from fednca.flower.records import count_bytes, from_arrays, to_arrays
from fednca.methods.contract import average

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(st.dictionaries(st.text(max_size=8), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6))
def test_every_tensor_arrives_as_it_was_sent(kinds):
    sent = {name: (torch.rand(shape) * 100).to(dtype) for name, (dtype, shape) in kinds.items()}
    found = from_arrays(to_arrays(sent))
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert count_bytes(sent) == sum(tensor.numpy().nbytes for tensor in sent.values())


def test_what_arrives_lies_in_one_vector_for_each_dtype_so_that_updates_are_averaged_at_once():
    sent = {"w": torch.rand(2, 3, 4, 5), "b": torch.rand(3), "n": torch.tensor(7)}
    found = average([from_arrays(to_arrays(sent)), from_arrays(to_arrays(sent))], [0.5, 0.5])
    assert isinstance(found, Packed)
    assert {dtype: len(vector) for dtype, vector in found.vectors.items()} == {torch.float32: 123, torch.int64: 1}
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


def test_tensors_of_any_memory_layout_arrive_and_can_be_changed():
    images = torch.rand(2, 3, 4, 5)
    sent = {"last": images.to(memory_format=torch.channels_last), "turned": images.transpose(0, 3), "whole": images}
    found = from_arrays(to_arrays(sent))
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor)
        found[name].zero_()
    assert images.min() > 0


def test_arrays_are_written_as_flower_writes_them():
    sent = {
        "a": torch.rand(2, 3),
        "b": torch.rand(5),
        "c": torch.tensor(7),
        "d": torch.zeros(0),
        "e": torch.tensor([True]),
    }
    record = to_arrays(sent)
    for array in record.values():
        again = Array(array.numpy())
        assert (array.dtype, array.shape, array.stype) == (again.dtype, again.shape, again.stype)
        assert array.data == again.data
    assert np.array_equal(record["float32"].numpy(), torch.cat([sent["a"].flatten(), sent["b"], sent["d"]]).numpy())


def test_a_record_has_few_arrays_however_many_tensors_there_are():
    assert len(to_arrays({str(number): torch.zeros(2) for number in range(200)})) == 2


def vector(numbers):
    return Array(np.asarray(numbers))


def text(content):
    return Array(np.frombuffer(json.dumps(content).encode(), np.uint8))


def raw(data):
    return Array("float32", (1,), "numpy.ndarray", data)


def pickled():
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, np.zeros(3))
    return buffer.getvalue()


def headed(shape):
    """An array's header, and no numbers behind it."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


THREE = vector(np.zeros(3, np.float32))
BROKEN = {
    "nothing": {},
    "no layout": {"float32": THREE},
    "pickle": {"layout": raw(pickled())},
    "archive": {"layout": raw(archive())},
    "no archive": {"layout": raw(b"PK\x03\x04")},
    "petabytes": {"layout": raw(headed("(1000000000000000,)"))},
    "a side beyond 64 bits": {"layout": raw(headed(f"({2**80},)"))},
    "open brackets": {"layout": raw(headed("(((("))},
    "no array": {"layout": raw(b"\x93NUMPY")},
    "empty": {"layout": raw(b"")},
    "no JSON": {"layout": vector(np.zeros(3, np.uint8))},
    "no list": {"layout": text(7)},
    "deep": {"layout": Array(np.frombuffer(b"[" * 100_000, np.uint8))},
    "too few numbers": {"layout": text([["w", "float32", [4]]]), "float32": THREE},
    "too many numbers": {"layout": text([["w", "float32", [2]]]), "float32": THREE},
    "numbers without names": {"layout": text([]), "float32": THREE},
    "a name twice": {"layout": text([["w", "float32", [1]], ["w", "float32", [2]]]), "float32": THREE},
    "a negative side": {"layout": text([["w", "float32", [-3, -1]]]), "float32": THREE},
    "half a side": {"layout": text([["w", "float32", [1.5, 2]]]), "float32": THREE},
    "a product beyond 64 bits": {
        "layout": text([["w", "float32", [2**62, 4]]]),
        "float32": vector(np.zeros(0, np.float32)),
    },
    "another dtype": {"layout": text([["w", "int64", [3]]]), "float32": THREE},
    "an unknown dtype": {"layout": text([["w", "float33", [3]]]), "float33": THREE},
    "numbers under another dtype's name": {"layout": text([["w", "int32", [3]]]), "int32": THREE},
    "texts": {"layout": text([["w", "float32", [1]]]), "float32": vector(["x"])},
    "a matrix": {"layout": text([["w", "float32", [3]]]), "float32": vector(np.zeros((1, 3), np.float32))},
    "another byte order": {"layout": text([["w", "float32", [3]]]), "float32": vector(np.zeros(3, ">f4"))},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_record_of_tensors_is_refused_with_a_sentence(kind):
    with pytest.raises(FedncaError, match="cannot be read as tensors"):
        from_arrays(ArrayRecord(BROKEN[kind]))
