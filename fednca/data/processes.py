"""Work for all cores: a `map` over spawned processes that come and go with their parent."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from fednca.base.errors import RunFailedError


def cores() -> int:
    """Count the cores that worker processes may use; 1 in a process that may have no children."""
    if multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def processes(count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Give a `map` that runs in this process and `count` - 1 others; leaving drops what has not begun."""
    if count == 1:
        yield map
        return
    # Spawned, since a fork of a process with torch's threads may hang.
    pool = ProcessPoolExecutor(count - 1, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield partial(_share_out, pool, 2 * (count - 1))
    except BrokenProcessPool as error:
        raise RunFailedError("a worker was killed, perhaps for want of memory; free some and try again") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _share_out(
    pool: ProcessPoolExecutor, backlog: int, function: Callable[..., Any], *arguments: Iterable[Any]
) -> Iterator[Any]:
    """Yield the results in order; while the pool has `backlog` tasks to do, as when it starts, do the next one here."""
    waiting: deque[Future[Any]] = deque()
    for task in zip(*arguments, strict=True):
        if sum(not future.done() for future in waiting) < backlog:
            with _main_hidden():
                waiting.append(pool.submit(function, *task))
        else:
            here: Future[Any] = Future()
            here.set_result(function(*task))
            waiting.append(here)
        while waiting and waiting[0].done():
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


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
