"""Work for all cores: a `map` over spawned processes that come and go with their parent."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fednca.errors import RunFailedError


def cores() -> int:
    """Count the cores that worker processes may use; 1 in a process that may have no children."""
    if multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def processes(count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Give a `map` that runs in `count` processes, for one in this process; leaving drops what has not begun."""
    if count == 1:
        yield map
        return
    # Spawned, since a fork of a process with torch's threads may hang.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_worker)

    def run(function: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        with _main_hidden():
            return pool.map(function, *arguments)

    try:
        yield run
    except BrokenProcessPool as error:
        raise RunFailedError("a worker process was killed, perhaps for want of memory; use fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Start processes without the caller's script: they would run it again, which is slow, and endless if unguarded."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent stops its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Leave when the parent has been killed, instead of waiting for its next task forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
