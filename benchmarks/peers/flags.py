"""Flags and errors that the benchmarks share: a mistake ends in one sentence before anything is measured."""

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from fednca.base.errors import FedncaError


def new_file(text: str) -> Path:
    """Read the path of a file to write, whose folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"give a file in an existing folder, not '{text}'")
    return path


def call(main: Callable[[], None]) -> None:
    """Run a benchmark; an error that the user can mend ends in one sentence and exit code 2."""
    try:
        main()
    except FedncaError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
