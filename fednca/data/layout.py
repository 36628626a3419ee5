"""Files in a dataset's official layout: what is missing, and what its lists and tables say."""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fednca.base.errors import FedncaError

MOST_NAMED = 3


def require(name: str, root: Path | None, missing: Callable[[Path], list[str]]) -> Path:
    """Return the folder of a dataset's files, or say in one sentence what it lacks."""
    if root is None:
        raise FedncaError(f"{name} is read from files; set data.root to the folder that holds them")
    lacking = missing(root)
    if lacking:
        more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        listed = ", ".join(lacking[:MOST_NAMED]) + more
        raise FedncaError(f"{name} lacks {listed}; put it there or run: fednca data prepare {name} --root '{root}'")
    return root


def require_files(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the paths of these files of one folder, or say which is missing."""
    there = set(os.listdir(folder))  # noqa: PTH208  one listing instead of a question per file
    absent = [name for name in names if name not in there]
    if absent:
        more = f", and so are {len(absent) - 1} more of the {len(names)} files" if len(absent) > 1 else ""
        raise FedncaError(f"'{folder / absent[0]}' is missing{more}; unpack the official images again")
    return tuple(folder / name for name in names)


def read_names(path: Path) -> list[str]:
    """Read a list of different names, one per line."""
    lines: dict[str, int] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        name = line.strip()
        if name in lines:
            raise FedncaError(f"'{path}' names '{name}' in lines {lines[name]} and {number}; remove one of them")
        if name:
            lines[name] = number
    if not lines:
        raise FedncaError(f"'{path}' names no image; put the official list in its place")
    return list(lines)


def read_table(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Read the named columns of a csv file: (line number, cells) for each row; case, '_' and ' ' do not matter."""
    reader = csv.reader(_text(path).splitlines())
    try:
        header = [_key(title) for title in next(reader, [])]
        absent = [column for column in columns if _key(column) not in header]
        if absent:
            raise FedncaError(f"'{path}' has no column '{absent[0]}'; put the official table in its place")
        places = [header.index(_key(column)) for column in columns]
        for cells in reader:
            if cells and len(cells) <= max(places):
                raise FedncaError(f"'{path}' line {reader.line_num} has only {len(cells)} fields; mend the line")
            if cells:
                yield reader.line_num, [cells[place].strip() for place in places]
    except csv.Error as error:
        raise FedncaError(f"'{path}' line {reader.line_num} cannot be read ({error}); mend the line") from error


def _key(title: str) -> str:
    return title.strip().replace("_", " ").lower()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FedncaError(f"'{path}' cannot be read ({error}); put the official file in its place") from error
