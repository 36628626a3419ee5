"""What a method keeps at a site (SCAFFOLD's control, FedCurv's curvature), as files: Flower's `context.state` lives in
the SuperNode's memory and is lost when it restarts.

The server says which version counts: the one after the last round in which it used the site's update. So a site starts
from the same state again when the server repeats a round, or when the site's last update came too late.

Each run has a folder of its own, named by the run's id; a new run removes all but the latest others. The digest by
which a site notices that its data have changed lies beside that folder and stays.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fednca.base.errors import ChangedDataError, FedncaError
from fednca.base.files import explain_write, write_atomic
from fednca.methods.contract import Server, Tensors
from fednca.runs.checkpoint import State, load_checkpoint, save_checkpoint

RUNS = 3  # whose states a site keeps
RUN = re.compile("[0-9a-f]{16}")  # a run's id, and the name of its folder


def load_state(folder: Path, number: int) -> Tensors | None:
    """Return the state after round `number`: an empty one before the first round, None if its file is lost."""
    path = _path(folder, number)
    if not number:
        return {}
    return load_checkpoint(path).clients.get(0, {}) if path.exists() else None


def save_state(folder: Path, number: int, accepted: int, state: Tensors) -> None:
    """Write the state after round `number`, keep the one after round `accepted`, and delete all others."""
    if not state:
        return
    with explain_write(folder):
        if not folder.exists():
            forget_runs(folder.parent, RUNS - 1)
        folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(_path(folder, number), State(number, Server({}), {0: state}))
    keep = {_path(folder, each).stem for each in (number, accepted)}
    for path in folder.glob("round-*"):
        if path.stem not in keep:
            path.unlink(missing_ok=True)


@contextmanager
def unchanged(folder: Path, data: str) -> Iterator[None]:
    """Note a digest of the site's data after its first work for a run, and refuse to work on other data later.

    One row more or less may reshuffle the splits, and the site would train on images that were for test.
    """
    path = folder.with_suffix(".data")
    check_writable(path.parent)
    known = path.exists()
    if known and path.read_text() != data:
        raise ChangedDataError(
            "the images, classes, labels or splits of this site have changed since it began this run; "
            "put table and site.toml back as they were, or begin a new run"
        )
    yield
    if not known:
        with explain_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data.encode())


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, or that cannot be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise FedncaError(f"folder '{folder}' cannot be written; give the node permission, or name another as `state`")


def forget_runs(folder: Path, keep: int) -> None:
    """Remove the states of all runs in a folder, except of those that changed last."""
    runs = [path for path in folder.glob("*") if RUN.fullmatch(path.name) and path.is_dir()]
    for path in sorted(runs, key=lambda run: run.stat().st_mtime)[: max(0, len(runs) - keep)]:
        shutil.rmtree(path)


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}.safetensors"
