"""Named tensors as Flower's ArrayRecord and back; what arrives is checked and never unpickled.

Flower sends every array of a record with a request of its own, and a network has some hundred tensors. So they travel
as one array for each dtype, beside the layout (JSON) that says which tensor lies where.
"""

from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from numpy.typing import NDArray
from torch import Tensor

from fednca.base.errors import FedncaError
from fednca.base.tensors import DTYPES, Layout, Packed, dtype_name, flat
from fednca.methods.contract import Tensors

LAYOUT = "layout"  # name of the array that holds it
NO_GAPS = 1  # alignment: a gap would only be sent


def to_arrays(tensors: Tensors) -> ArrayRecord:
    """Put tensors into a record, from whatever device they are on; dtypes stay as they are."""
    layout = Layout.of(dict(sorted(tensors.items())), alignment=NO_GAPS)
    arrays = {LAYOUT: _write([np.frombuffer(layout.to_json().encode(), np.uint8)])}
    for dtype in layout.lengths:
        names = [name for name, own, _ in layout.places if own == dtype]
        arrays[dtype_name(dtype)] = _write([flat(tensors[name]).detach().cpu().numpy() for name in names])
    return ArrayRecord(arrays)


def from_arrays(record: ArrayRecord) -> Tensors:
    """Return the tensors of a record; refuse a record that holds anything else."""
    try:
        arrays = {name: _read(array) for name, array in record.items()}
        layout = Layout.from_json(arrays.pop(LAYOUT).numpy().tobytes().decode(), NO_GAPS)
        vectors = {DTYPES[name]: vector for name, vector in arrays.items()}
        layout.check(vectors)
        return Packed(layout, vectors)
    except Exception as error:  # noqa: BLE001 (hostile bytes make numpy, zipfile and json raise many kinds)
        reason = str(error).partition("\n")[0][:100]
        raise FedncaError(f"what it sent cannot be read as tensors ({type(error).__name__}: {reason})") from None


def count_bytes(tensors: Tensors) -> int:
    """Return how many bytes the numbers of these tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _write(pieces: list[NDArray[Any]]) -> Array:
    """Join vectors of one dtype in numpy's file format, as `numpy.save` would, but with a single copy."""
    dtype, shape = pieces[0].dtype, (sum(map(len, pieces)),)
    header = BytesIO()
    write_array_header_1_0(header, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return Array(str(dtype), shape, SType.NUMPY, b"".join([header.getvalue(), *(piece.data for piece in pieces)]))


def _read(array: Array) -> Tensor:
    numbers: object = array.numpy()  # numpy.load without pickle
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1:  # an archive, which numpy.load reads too
        raise TypeError("not a vector of numbers")
    return torch.from_numpy(np.require(numbers, requirements="W"))
