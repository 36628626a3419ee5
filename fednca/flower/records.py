"""What travels as a flat `dict[str, Tensor]`, as Flower's ArrayRecord; what arrives is never unpickled.

Flower sends every array of a record by requests of its own, some hundred for a network. So the tensors travel one
behind the other, as one array for each dtype, beside a layout (JSON) that says which is which; 4-D tensors, which
are convolutions, lie channels last.
"""

import json
import math
from io import BytesIO
from itertools import groupby
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import NDArray
from torch import Tensor

from fednca.base.errors import FedncaError
from fednca.base.tensors import view
from fednca.methods.contract import Tensors

LAYOUT = "layout"  # name of the array that holds it


def to_arrays(tensors: Tensors) -> ArrayRecord:
    """Put tensors into a record, on whatever device they are; every dtype stays what it is."""
    ordered = sorted(tensors, key=lambda name: (_kind(tensors[name]), name))
    layout = [(name, _kind(tensors[name]), list(tensors[name].shape)) for name in ordered]
    arrays = {LAYOUT: _join([np.frombuffer(json.dumps(layout).encode(), np.uint8)])}
    for kind, names in groupby(ordered, key=lambda name: _kind(tensors[name])):
        arrays[kind] = _join([_in_order(tensors[name]).numpy() for name in names])
    return ArrayRecord(arrays)


def from_arrays(record: ArrayRecord) -> Tensors:
    """Take tensors out of a record, and refuse one that holds anything else."""
    try:
        arrays = {name: _load(array) for name, array in record.items()}
        layout = json.loads(arrays.pop(LAYOUT).numpy().tobytes())
        return _split(arrays, layout)
    except Exception as error:  # noqa: BLE001 (what a stranger's bytes make numpy, zipfile and tokenize raise is no list)
        reason = str(error).partition("\n")[0][:100]
        raise FedncaError(f"what it sent cannot be read as tensors ({type(error).__name__}: {reason})") from None


def count_bytes(tensors: Tensors) -> int:
    """Return how many bytes of numbers these tensors are."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _split(arrays: Tensors, layout: list[tuple[str, str, list[int]]]) -> Tensors:
    """Cut the arrays into the tensors of the layout, which must use all of every one."""
    found: Tensors = {}
    taken = dict.fromkeys(arrays, 0)
    for name, kind, shape in layout:
        if min(shape, default=0) < 0:
            raise ValueError("a shape has a negative side")
        start, length = taken[kind], math.prod(shape)
        found[str(name)] = view(arrays[kind][start : start + length], torch.Size(shape))
        taken[kind] += length
    if len(found) != len(layout) or any(len(arrays[kind]) != end for kind, end in taken.items()):
        raise ValueError("the layout does not fit the numbers")
    return found


def _join(pieces: list[NDArray[Any]]) -> Array:
    """Put vectors of one dtype behind each other, as `numpy.save` would write them joined, but copied only once."""
    dtype, shape = pieces[0].dtype, (sum(map(len, pieces)),)
    header = BytesIO()
    write_array_header_1_0(header, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return Array(str(dtype), shape, SType.NUMPY, b"".join([header.getvalue(), *(piece.data for piece in pieces)]))


def _load(array: Array) -> Tensor:
    numbers: object = array.numpy()  # numpy.load without pickle
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1:  # an archive, which numpy.load reads too
        raise TypeError("not a vector of numbers")
    return torch.from_numpy(np.require(numbers, requirements="W"))


def _in_order(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as a vector, 4-D ones channels last: so models lie, and nothing is reordered."""
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).detach().cpu().reshape(-1)


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
