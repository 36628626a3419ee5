"""One fixed vector per class name: from CLIP's text encoder, from a file, or random."""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fednca.base.arrays import read_arrays, write_arrays
from fednca.base.errors import FedncaError
from fednca.base.files import cache_folder, explain_write
from fednca.base.packages import needed
from fednca.base.randomness import seeded
from fednca.models.etf import orthonormal_rows

PROMPT = "The photo contains {name}."
CLIP = ("ViT-B-32-quickgelu", "openai")  # open_clip's names of architecture and weights
SUFFIXES = (".npz", ".npy", ".safetensors")
# Class names of PASCAL VOC and CIFAR-10, and what COCO calls the same classes.
ALIASES = {
    "aeroplane": "airplane",
    "automobile": "car",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "tvmonitor": "tv",
}


def text_table(classes: Sequence[str], dim: int, source: str = "auto", seed: int = 0) -> tuple[Tensor, str]:
    """Return one unit vector per class, (C, d), and the name of their origin.

    source: `clip`, `random`, a file, or `auto`, which is `clip` if open_clip is installed and `random` if not.
    A table of another width than d is projected by a seeded random matrix with orthonormal rows or columns.
    """
    source = resolve_source(source)
    if source == "random":
        return orthonormal_rows(len(classes), dim, seed, "text table"), origin(source)
    table = clip_table(classes) if source == "clip" else file_table(Path(source), classes)
    return F.normalize(project(torch.from_numpy(table), dim, seed), dim=1).float(), origin(source)


def resolve_source(source: str) -> str:
    """Replace `auto` by what it means on this machine, and refuse an unknown source."""
    if source == "auto":
        return "clip" if importlib.util.find_spec("open_clip") else "random"
    if source not in {"clip", "random"} and Path(source).suffix not in SUFFIXES:
        raise FedncaError(f"text table '{source}' is not known; use auto, clip, random or a {'/'.join(SUFFIXES)} file")
    return source


def origin(source: str) -> str:
    """Return where a resolved source's vectors come from, to be shown with every result that depends on them."""
    names = {"clip": "CLIP ViT-B/32", "random": "random orthonormal stand-in"}
    return names.get(source) or f"file {Path(source).name}"


def project(table: Tensor, dim: int, seed: int) -> Tensor:
    """Project rows (C, w) to width d by a seeded random matrix with orthonormal rows or columns."""
    width = table.shape[1]
    if width == dim:
        return table
    basis = orthonormal_rows(min(width, dim), max(width, dim), seed, "text projection").to(table.dtype)
    return table @ (basis if width < dim else basis.T)


def clip_table(classes: Sequence[str]) -> NDArray[np.float64]:
    """Return CLIP's text embeddings (C, 512), from the cache if they have been computed before."""
    prompts = [PROMPT.format(name=name.replace("_", " ")) for name in classes]
    key = hashlib.sha256("\n".join([*CLIP, *prompts]).encode()).hexdigest()[:16]
    path = cache_folder() / f"clip-{key}.npz"
    if not path.exists():
        table = encode_with_clip(prompts)
        with explain_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, {"names": np.array(classes), "table": table})
    return file_table(path, classes)


def encode_with_clip(prompts: list[str]) -> NDArray[np.float32]:
    """Embed prompts with open_clip's text encoder, without changing the global random state."""
    open_clip = needed("open_clip", "clip", "text table 'clip'", ", or use random or a file")
    architecture, weights = CLIP
    try:
        with seeded(0, "clip"), torch.no_grad():
            model = open_clip.create_model(architecture, pretrained=weights).eval()
            embedded: Tensor = model.encode_text(open_clip.get_tokenizer(architecture)(prompts))
    except (OSError, RuntimeError) as error:
        raise FedncaError(
            f"CLIP's weights '{weights}' could not be loaded ({error}); go online once, or use random or a file"
        ) from error
    return embedded.float().numpy()


def file_table(path: Path, classes: Sequence[str]) -> NDArray[np.float64]:
    """Return the rows (C, w) of a file in the order of the classes, matched by name if the file has names."""
    table, names = read_table(path)
    if names is None:
        if len(table) != len(classes):
            raise FedncaError(
                f"'{path}' has {len(table)} rows and no names for {len(classes)} classes; give one row per class"
            )
        return table
    exact = {name.lower(): row for row, name in enumerate(names)}
    loose = {canonical(name): row for row, name in enumerate(names)}
    rows = [exact.get(name.lower(), loose.get(canonical(name))) for name in classes]
    missing = [name for name, row in zip(classes, rows, strict=True) if row is None]
    if missing:
        raise FedncaError(f"'{path}' has no row for {', '.join(missing)}; add them or use another text table")
    return table[[row for row in rows if row is not None]]


def canonical(name: str) -> str:
    """Return a name in lower case, without spaces and signs, and as COCO calls it.

    >>> canonical("Dining table"), canonical("diningtable"), canonical("sofa")
    ('diningtable', 'diningtable', 'couch')
    """
    letters = "".join(filter(str.isalnum, name.lower()))
    return ALIASES.get(letters, letters)


def read_table(path: Path) -> tuple[NDArray[np.float64], list[str] | None]:
    """Read the array `table` (or the only one) of a file, and its `names` if it has them."""
    arrays = read_arrays(path, "give another text table")
    names = arrays.pop("names", None)
    if "table" not in arrays and len(arrays) != 1:
        found = ", ".join(sorted(arrays)) or "none"
        raise FedncaError(f"'{path}' has no array 'table' (found: {found}); name the matrix 'table'")
    table = arrays["table"] if "table" in arrays else next(iter(arrays.values()))
    if table.ndim != 2 or table.dtype.kind not in "fiu":
        raise FedncaError(
            f"the text table '{path}' is {table.dtype} of shape {table.shape}; give a matrix with one row per class"
        )
    if names is not None and names.shape != table.shape[:1]:
        raise FedncaError(f"'{path}' names {names.size} of its {len(table)} rows; name each row once")
    numbers = table.astype(np.float64)
    lengths = np.linalg.norm(numbers, axis=1)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise FedncaError(f"the text table '{path}' has a row that is zero or not finite; give each class a vector")
    return numbers, None if names is None else [str(name) for name in names]
