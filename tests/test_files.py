"""Files written behind a run's back: in order, the newest only, and never silently not."""

import threading
from pathlib import Path

import pytest

from fednca.files import Writer


def test_leaving_waits_for_everything_and_a_file_that_waits_is_replaced_by_a_newer_one():
    busy, done = threading.Event(), []

    def first():
        busy.wait(30)
        done.append("first")

    with Writer() as writer:
        writer.write(Path("a"), first)
        while writer.waiting:  # until the thread has begun
            pass
        for number in range(3):
            writer.write(Path("z"), lambda number=number: done.append(f"z{number}"))
            writer.write(Path("b"), lambda number=number: done.append(f"b{number}"))
        busy.set()
    assert done == ["first", "b2", "z2"]


def fail():
    raise OSError("full")


def write(*works, wait=False, error=None):
    """Give all works to one writer, wait for its thread if it should have failed, and leave by an error if any."""
    with Writer() as writer:
        for number, work in enumerate(works):
            writer.write(Path(str(number)), work)
            if wait:
                writer.thread.join(30)
        if error:
            raise error


def test_a_failure_is_raised_when_leaving():
    with pytest.raises(OSError, match="full"):
        write(fail)


def test_a_failure_is_raised_by_the_next_write():
    done = []
    with pytest.raises(OSError, match="full"):
        write(fail, lambda: done.append(1), wait=True)
    assert not done


def test_another_error_is_not_hidden_by_a_failed_write():
    with pytest.raises(ZeroDivisionError):
        write(fail, error=ZeroDivisionError())
