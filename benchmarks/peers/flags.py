"""What the benchmarks' flags take; a wrong value is refused before anything is measured."""

from argparse import ArgumentTypeError
from pathlib import Path


def new_file(text: str) -> Path:
    """Read the path of a file to write, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"give a file in a folder that exists, not '{text}'")
    return path
