"""The run folder: creating it, locking it against other processes, and reading its files."""

import fcntl
import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fednca.base.errors import FedncaError, InUseError, RunFailedError
from fednca.base.files import explain_write, named_in_utf8, resuming
from fednca.config import Config

PACKAGES = ("fednca", "torch", "torchvision", "timm", "numpy", "scikit-learn", "safetensors")


def default_folder(config: Config) -> Path:
    """Return the folder of a run for which none is given."""
    data, method = (name.replace(":", ".") for name in (config.data.name, config.method.name))  # of package.module:Name
    return Path("runs") / f"{data}-{config.partition.beta:g}" / f"{method}-seed{config.seed}"


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
    """Delete a new run folder if the run is refused before its first round, so that its name is free again."""
    try:
        yield
    except FedncaError as error:
        if not (isinstance(error, RunFailedError) or (folder / "history.jsonl").exists()):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def environment() -> dict[str, Any]:
    """Return the versions and the machine that a run's numbers may depend on."""
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
    """Lock a run folder against other processes; the lock ends with the process, however that ends."""
    path = folder / ".lock"
    with explain_write(path):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"'{folder}' is in use by another process") from None
        yield
