"""Use all cores: a `map` over worker processes that end with their parent."""

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

from fednca.errors import RunFailedError


def cores() -> int:
    """Count the cores that worker processes may use; 1 in a process that may not start any."""
    if multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def processes(count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` that runs in this process and `count` - 1 others; leaving cancels tasks that have not started."""
    if count == 1:
        yield map
        return
    # Spawn them: forking a process that has torch's threads may hang.
    pool = ProcessPoolExecutor(count - 1, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield partial(_share_out, pool, 2 * (count - 1))
    except BrokenProcessPool as error:
        raise RunFailedError("a worker was killed, perhaps because memory ran out; free some and try again") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _share_out(
    pool: ProcessPoolExecutor, backlog: int, function: Callable[..., Any], *arguments: Iterable[Any]
) -> Iterator[Any]:
    """Yield the results in order; while `backlog` tasks wait for the pool, as when it starts, do the next one here."""
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
    """Hide the caller's script from new processes: they would run it again, endlessly if it has no `__main__` guard."""
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
    """Exit when the parent is killed, instead of waiting for its next task forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
