"""Files that are whole at any moment, and those written behind a run's back: the newest only, never silently not."""

import os
import threading
from concurrent import futures

import pytest

from fednca.base.files import Writer, write_atomic


def test_leaving_waits_for_everything_and_what_waits_is_replaced_by_what_is_newer():
    busy, done = threading.Event(), []

    def first():
        busy.wait(30)
        done.append("first")

    with Writer() as writer:
        writer.write(first)
        while writer.waiting:  # until the thread has begun
            pass
        for number in range(3):
            writer.write(lambda number=number: done.append(number))
        busy.set()
    assert done == ["first", 2]


def fail():
    raise OSError("full")


def write(*works, wait=False, error=None):
    """Give all works to one writer, wait for its thread if it should have failed, and leave by an error if any."""
    with Writer() as writer:
        for work in works:
            writer.write(work)
            if wait:
                futures.wait(writer.tasks, 30)
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


def test_a_link_stays_a_link_to_what_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/file")
    for content in (b"new", b"newer"):
        write_atomic(link, content)
        assert link.is_symlink()
        assert (tmp_path / "there/file").read_bytes() == content
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "link", "there"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_atomic(pipe, b"content")
    reader.join(30)
    assert found == [b"content"]
    assert pipe.is_fifo()
