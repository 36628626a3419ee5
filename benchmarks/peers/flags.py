"""What the benchmarks' flags take; a wrong value is refused before anything is measured."""

from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """Read a number of at least one."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return number


def new_file(text: str) -> Path:
    """Read the path of a file to write, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"'{text}' is not a file in a folder that exists")
    return path
