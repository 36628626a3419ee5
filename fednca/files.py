"""Writing files so that a kill at any moment leaves either the old content or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fednca.errors import RunFailedError


def cache_folder() -> Path:
    """Return where what can be made again is kept for the user."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fednca"


@contextmanager
def explain_write(path: Path) -> Iterator[None]:
    """Turn a failed write (full or read-only disk, missing right) into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFailedError(f"cannot write '{path}': {reason}; what was finished before is kept") from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it."""
    temporary = path.with_name(path.name + ".partial")
    with explain_write(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str) -> None:
    """Append one line to a text file."""
    with explain_write(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
