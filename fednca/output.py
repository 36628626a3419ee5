"""Standard output, whose failures say what they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from fednca.errors import FedncaError


class OutputError(FedncaError):
    """Standard output takes nothing more."""


class Output:
    """A stream that says why it cannot be written; a pipe that is read no longer stays a BrokenPipeError."""

    def __init__(self, stream: TextIO) -> None:
        """Write to a stream."""
        self.stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Be the stream in all other respects."""
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with explained():
            return self.stream.write(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with explained():
            self.stream.flush()


@contextmanager
def explained() -> Iterator[None]:
    """Turn a failed write into one sentence."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None
