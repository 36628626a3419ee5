"""What a method keeps at a site (SCAFFOLD's control, FedCurv's curvature): files, since Flower's `context.state` lives
in the SuperNode's memory and is gone when it restarts.

The server says which version counts: the one after the last round in which it took the site's update. A round that is
done again after a restart of the server, or whose update came too late, then starts from where it started before.

Each run has a folder of its own, named by its id; when a run begins, all but the latest others are removed.
What tells whether the site's data are still the same lies beside it, and stays.
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
    """Return the state after round `number`; none before the first one, None where it should be there and is not."""
    path = _path(folder, number)
    if not number:
        return {}
    return load_checkpoint(path).clients.get(0, {}) if path.exists() else None


def save_state(folder: Path, number: int, accepted: int, state: Tensors) -> None:
    """Write the state after round `number` beside the one that it came from, and forget older and disowned ones."""
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
    """Note the digest of a site's data after its first work for a run, and refuse to work with others later.

    Dealt anew after a row more or less, images that were for test would be trained on.
    """
    path = folder.with_suffix(".data")
    check_writable(path.parent)
    known = path.exists()
    if known and path.read_text() != data:
        raise ChangedDataError(
            "the images, classes, labels or splits of this site are not those that it began this run with; "
            "put table and site.toml back as they were, or begin a new run"
        )
    yield
    if not known:
        with explain_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data.encode())


def check_writable(folder: Path) -> None:
    """Refuse a folder in which, or as which, nothing can be written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise FedncaError(f"folder '{folder}' cannot be written; let the node do so, or name another as `state`")


def forget_runs(folder: Path, keep: int) -> None:
    """Remove the states of all runs in a folder but those that were changed last."""
    runs = [path for path in folder.glob("*") if RUN.fullmatch(path.name) and path.is_dir()]
    for path in sorted(runs, key=lambda run: run.stat().st_mtime)[: max(0, len(runs) - keep)]:
        shutil.rmtree(path)


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}.safetensors"
