"""Standard output, whose failures say what they are."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any, cast

from fednca.errors import FedncaError


class OutputError(FedncaError):
    """Standard output takes nothing more; `unread` where that is no mistake, as in `fednca methods | head`."""

    def __init__(self, error: OSError) -> None:
        """Say why a write failed."""
        self.unread = isinstance(error, BrokenPipeError)
        reason = f"cannot write to standard output: {error.strerror}"
        super().__init__("standard output is read no longer" if self.unread else reason)


class Output:
    """A stream that says why it cannot be written, once: all that comes after is dropped."""

    def __init__(self, stream: IO[str]) -> None:
        """Write to a stream."""
        self.stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Be the stream in all other respects."""
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._explained():
            return self.stream.write(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with self._explained():
            self.stream.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # or Python would complain when it ends
            raise OutputError(error) from None


@contextmanager
def standard_output() -> Iterator[None]:
    """Let a failed write of anything that is printed raise an OutputError, at the end at the latest."""
    output = Output(sys.stdout)
    with redirect_stdout(cast(IO[str], output)):
        try:
            yield
        except BaseException as error:
            with suppress(*[] if isinstance(error, SystemExit) else [OutputError]):  # argparse exits after its help
                output.flush()
            raise
        output.flush()
