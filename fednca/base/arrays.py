"""Files of named arrays, written atomically and read without pickle."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fednca.base.errors import FedncaError
from fednca.base.files import write_atomic


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays to an npz file at exactly this path."""
    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def read_arrays(path: Path, way_out: str) -> dict[str, NDArray[np.generic]]:
    """Read the arrays of an npz or safetensors file, or the array of an npy file, under the file's name."""
    try:
        if path.suffix == ".safetensors":
            tensors: dict[str, NDArray[np.generic]] = load_file(path)
            return tensors
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {path.stem: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except Exception as error:  # noqa: BLE001 (numpy, zipfile and tokenize may raise any error on untrusted bytes)
        raise FedncaError(f"'{path}' cannot be read ({error}); {way_out}") from None
