"""Writing files so that a kill at any moment leaves either the old content or the new one."""

import os
import shlex
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fednca.base.errors import FedncaError, RunFailedError


def cache_folder() -> Path:
    """Return the user's cache folder, for files that can be made again."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fednca"


def named_in_utf8(path: str | Path) -> Path:
    """Return the path of a folder; refuse a name that is not UTF-8, since no checkpoint in it could be opened."""
    if not is_utf8(str(path)):
        raise FedncaError(f"'{path}' is not named in UTF-8; rename the folder, or choose another")
    return Path(path)


def is_utf8(text: str) -> bool:
    """Return whether a text is valid UTF-8, which a file name need not be."""
    return text == text.encode(errors="replace").decode()


def resuming(folder: Path) -> str:
    """Return the command that resumes a run, quoted for a shell.

    >>> resuming(Path("runs/my run"))
    "`fednca resume 'runs/my run'`"
    """
    return f"`fednca resume {shlex.quote(str(folder))}`"


@contextmanager
def explain_write(path: Path) -> Iterator[None]:
    """Report a failed write (full or read-only disk, missing permission) in one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFailedError(f"cannot write '{path}': {reason}; fix that or choose another place") from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it.

    A symbolic link stays a link, and its target is replaced. A pipe or device is written to directly.
    """
    target = path.resolve() if path.is_symlink() else path
    temporary = target.with_name(target.name + ".partial")
    with explain_write(path):
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(content)
            return
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str) -> None:
    """Append one line to a text file."""
    with explain_write(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


class Writer(AbstractContextManager["Writer"]):
    """Writes in another thread; if work comes faster than it is done, only the newest piece is kept waiting.

    Leaving the block waits until all is written. A failure is raised by the next call, or on leaving.
    """

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque(maxlen=1)
        self.thread, self.tasks = ThreadPoolExecutor(1), list[Future[None]]()

    def write(self, work: Callable[[], None]) -> None:
        """Do `work` in the thread; it takes the place of work that still waits."""
        self._check()
        self.waiting.append(work)
        self.tasks.append(self.thread.submit(self._work))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait for the last write."""
        self.thread.shutdown()
        if error is None:
            self._check()

    def _check(self) -> None:
        """Raise the first failure, and forget what is done."""
        self.tasks = [task for task in self.tasks if not task.done() or task.result()]

    def _work(self) -> None:
        if self.waiting:  # a piece that was replaced leaves a task without work
            self.waiting.pop()()
