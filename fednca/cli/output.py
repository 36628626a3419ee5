"""Standard output, with failed writes reported in one sentence."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any, cast

from fednca.base.errors import FedncaError


class OutputError(FedncaError):
    """A failed write to standard output; `unread` if its reader is gone, as in `fednca methods | head`."""

    def __init__(self, error: OSError) -> None:
        self.unread = isinstance(error, BrokenPipeError)
        reason = f"cannot write to standard output: {error.strerror}"
        super().__init__("nobody reads standard output any more" if self.unread else reason)


class Output:
    """A stream that reports its first failed write in one sentence and drops all later ones."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Leave everything else to the stream."""
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._explained():
            return self.stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        with self._explained():
            self.stream.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # else Python would complain on exit
            raise OutputError(error) from None


@contextmanager
def standard_output() -> Iterator[None]:
    """Raise an OutputError if anything printed in the block cannot be written, at its end at the latest."""
    output = Output(sys.stdout)
    with redirect_stdout(cast(IO[str], output)):
        try:
            yield
        except BaseException as error:
            with suppress(*[] if isinstance(error, SystemExit) else [OutputError]):  # argparse exits after its help
                output.flush()
            raise
        output.flush()
