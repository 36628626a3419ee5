"""The files of a run folder: making it, keeping others out of it, reading back what it holds."""

import fcntl
import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednca.config import Config
from fednca.engine.loop import Record
from fednca.errors import FedncaError, InUseError, RunFailedError
from fednca.files import explain_write, named_in_utf8, resuming, write_atomic
from fednca.models.text import keep_table
from fednca.models.tokens import LabelTransformerHead

TEXTS = "texts.npz"  # what a model with frozen texts takes from elsewhere
PACKAGES = ("fednca", "torch", "torchvision", "timm", "numpy", "scikit-learn", "safetensors")


def default_folder(config: Config) -> Path:
    """Return where a run goes that names no folder."""
    return Path("runs") / f"{config.data.name}-{config.partition.beta:g}" / f"{config.method.name}-seed{config.seed}"


def create_folder(folder: Path) -> Path:
    """Create a new run folder, or take an empty one."""
    named_in_utf8(folder)
    if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
        way_out = f"go on with {resuming(folder)} or " if (folder / "config.toml").exists() else ""
        raise FedncaError(f"'{folder}' exists already; {way_out}choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedncaError(f"cannot create '{folder}': {error.strerror}; choose another --out") from None
    return folder


@contextmanager
def forgotten_unless_begun(folder: Path) -> Iterator[None]:
    """Remove a new run folder where a mistake shows before the first round: once mended, the run may have its place."""
    try:
        yield
    except FedncaError as error:
        if not (isinstance(error, RunFailedError) or (folder / "history.jsonl").exists()):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def environment() -> dict[str, Any]:
    """Return what the numbers of a run may depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def truncate_history(path: Path, rounds: int) -> None:
    """Cut history back to the first `rounds` lines: a later or half-written one belongs to no checkpoint."""
    records = read_history(path, rounds)
    if len(records) < rounds:
        raise FedncaError(f"'{path}' has {len(records)} rounds where the last checkpoint has {rounds}")
    write_atomic(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())


def read_history(path: Path, rounds: int | None = None) -> list[Record]:
    """Read the whole lines of a history, or the first `rounds` of them, and check that they are rounds 1, 2, …"""
    text = read_text(path) if path.exists() else ""
    records = []
    for number, line in enumerate(text.split("\n")[:-1][:rounds], start=1):
        try:
            record = json.loads(line)
            sound = record["round"] == number
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise FedncaError(f"'{path}' is damaged in line {number}")
        records.append(record)
    return records


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run."""
    try:
        found: dict[str, Any] = json.loads(read_text(path))
    except ValueError as error:
        raise FedncaError(f"'{path}' is damaged ({error})") from None
    return found


def read_text(path: Path) -> str:
    """Read a text file of a run."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedncaError(f"'{path}' cannot be read ({error})") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of a run folder; the lock goes with the process, however it ends."""
    path = folder / ".lock"
    with explain_write(path):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"'{folder}' is in use by another process") from None
        yield


def keep_texts(folder: Path, classes: Sequence[str], model: nn.Module) -> None:
    """Keep the text table of a model that has one, which needs no file of elsewhere then."""
    head = model.get_submodule("head")
    if isinstance(head, LabelTransformerHead):
        keep_table(folder / TEXTS, classes, head.texts)
