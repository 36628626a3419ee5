"""Check and read the files of a dataset's official layout: images, lists and tables."""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fednca.errors import FedncaError

MOST_NAMED = 3


def require(name: str, root: Path | None, missing: Callable[[Path], list[str]]) -> Path:
    """Return the folder of a dataset's files, or raise an error that names what is missing."""
    if root is None:
        raise FedncaError(f"{name} is read from files; set data.root to the folder that holds them")
    lacking = missing(root)
    if lacking:
        more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        listed = ", ".join(lacking[:MOST_NAMED]) + more
        raise FedncaError(f"{name} lacks {listed}; put it there or run: fednca data prepare {name} --root '{root}'")
    return root


def require_files(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the paths of the named files of one folder, or raise an error that names a missing one."""
    there = set(os.listdir(folder))  # noqa: PTH208  one listing is faster than a lookup per file
    absent = [name for name in names if name not in there]
    if absent:
        more = f" (and {len(absent) - 1} more of the {len(names)} files)" if len(absent) > 1 else ""
        raise FedncaError(f"'{folder / absent[0]}' is missing{more}; unpack the official images again")
    return tuple(folder / name for name in names)


def read_names(path: Path) -> list[str]:
    """Read a list of names, one per line, and refuse duplicates."""
    lines: dict[str, int] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        name = line.strip()
        if name in lines:
            raise FedncaError(f"'{path}' names '{name}' twice, in lines {lines[name]} and {number}; remove one of them")
        if name:
            lines[name] = number
    if not lines:
        raise FedncaError(f"'{path}' names no image; replace it with the official list")
    return list(lines)


def read_table(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of the named columns for each row of a CSV file.

    Column names match whatever their case, and '_' matches ' '.
    """
    reader = csv.reader(_text(path).splitlines())
    try:
        header = [_key(title) for title in next(reader, [])]
        absent = [column for column in columns if _key(column) not in header]
        if absent:
            raise FedncaError(f"'{path}' has no column '{absent[0]}'; replace it with the official table")
        places = [header.index(_key(column)) for column in columns]
        for cells in reader:
            if cells and len(cells) <= max(places):
                raise FedncaError(f"'{path}' line {reader.line_num} has only {len(cells)} fields; fix the line")
            if cells:
                yield reader.line_num, [cells[place].strip() for place in places]
    except csv.Error as error:
        raise FedncaError(f"'{path}' line {reader.line_num} cannot be read ({error}); fix the line") from error


def _key(title: str) -> str:
    return title.strip().replace("_", " ").lower()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FedncaError(f"'{path}' cannot be read ({error}); replace it with the official file") from error
