"""Your own images: a folder of them, and a table (CSV or Parquet) that says what each one shows."""

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednca.data.federation import hold_out
from fednca.data.fetch import Progress
from fednca.data.types import Dataset, FileImages, Split
from fednca.errors import FedncaError
from fednca.options import Options as BaseOptions
from fednca.packages import needed

SUMMARY = "your own images, with a table of labels"
LICENCE = "yours"
CLASSES: tuple[str, ...] = ()
SIZE = "your own"
OBTAINED = "put labels.csv and the images into the folder"

TABLES = ("labels.csv", "labels.parquet")
IMAGE = ("image", "images", "filename", "filenames", "file", "path", "id")
GROUP = ("group", "patient", "patient_id", "subject")
SITE = ("site", "hospital")
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


class Options(BaseOptions):
    """How to read the table; give column names as they are in its header."""

    table: str | None = None
    """File of the table, below the root; by default labels.csv or labels.parquet."""
    image_column: str | None = None
    """Column of image paths; by default image, filename, file, path or id, else the first column."""
    label_column: str | None = None
    """Column that lists the names of an image's classes; by default each class has its own column of 0 and 1."""
    separator: str = Field(default="|", min_length=1)
    """Text between two class names in `label_column`."""
    split_column: str = "split"
    """Column that says whether an image is for train, val or test."""
    group_column: str | None = None
    """Column of groups whose images stay together; by default group, patient, patient_id or subject, if present."""
    site_column: str | None = None
    """Column that says which site an image comes from; by default site or hospital, if present."""
    classes: list[str] | None = None
    """Classes to use, in order, as cat,dog or ["cat","dog, sitting"]; a class that the table lacks is unknown."""
    image_folder: str | None = None
    """Folder that the image paths start from, below the root; by default images if it exists, else the root."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the training images to set aside for test if the table has no test rows."""
    seed: int = 0
    """Seed that picks the images to set aside for test."""


@dataclass(frozen=True)
class Table:
    """A table as text; `numbers` are its row numbers as in a spreadsheet, where the header is row 1."""

    path: Path
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...]

    def column(self, name: str) -> list[str]:
        """Return the cells of one column."""
        at = self.header.index(name)
        return [row[at] for row in self.rows]


def missing(root: Path) -> list[str]:
    """Return what the folder lacks."""
    if any((root / name).is_file() for name in TABLES):
        return []
    return [f"the table '{root / TABLES[0]}' with a column of image paths and a column of 0 and 1 for each class"]


def prepare(root: Path, progress: Progress) -> None:
    """Do nothing: there is nothing to download, and `load` says where the table belongs."""


def load(options: Options, root: Path | None) -> Dataset:
    """Read the table and find the images, which stay files until something needs their pixels."""
    if root is None:
        raise FedncaError("dataset 'folder' has no root; set data.root to the folder of the images and the table")
    table = read_table(find_table(options, root))
    image = find_column(table, "image_column", options.image_column, IMAGE) or table.header[0]
    # A table need not have the default column, only one that the user has chosen.
    chosen = None if options.split_column == "split" else options.split_column
    split = find_column(table, "split_column", chosen, ("split",))
    group = find_column(table, "group_column", options.group_column, GROUP)
    site = find_column(table, "site_column", options.site_column, SITE)

    classes, labels = read_labels(table, options, {image, split, group, site})
    paths = image_paths(table, image, find_images(options, root))
    groups = None if group is None else numbered(table, group)[1]
    names, sites = ((), None) if site is None else numbered(table, site)
    parts = np.array(parts_of(table, split))
    if group is not None and groups is not None:
        _check_groups(table, group, parts, groups)
    everything = Split(FileImages(tuple(paths)), labels, groups, sites)
    rows = _rows(everything, parts, options)
    if not len(rows["train"]):
        raise FedncaError(f"table '{table.path}' has no image for training; add rows with split 'train'")
    val = _take(everything, rows["val"]) if len(rows["val"]) else None
    return Dataset("folder", classes, _take(everything, rows["train"]), val, _take(everything, rows["test"]), names)


def read_table(path: Path) -> Table:
    """Read a whole table as text, and refuse one whose rows differ in length."""
    records = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    header = tuple(cell.strip() for cell in records[0]) if records else ()
    rows = [(n, tuple(cell.strip() for cell in row)) for n, row in enumerate(records[1:], 2) if row]
    if not rows:
        raise FedncaError(f"table '{path}' has no rows below its header; give one row per image")
    if len(header) == 1 and {";", "\t"} & set(header[0]):
        raise FedncaError(f"table '{path}' has one column, '{header[0]}'; put commas between the columns")
    for name in header:
        if name and header.count(name) > 1:
            raise FedncaError(f"table '{path}' has two columns '{name}'; rename one")
    for number, row in rows:
        if len(row) != len(header):
            raise FedncaError(f"table '{path}' row {number} has {len(row)} cells for {len(header)} columns; fix it")
    return Table(path, header, tuple(row for _, row in rows), tuple(number for number, _ in rows))


def _read_csv(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.reader(file))
    except UnicodeDecodeError as error:
        raise FedncaError(f"table '{path}' is not UTF-8 (byte {error.start}); save it as 'CSV UTF-8'") from error
    except (OSError, csv.Error) as error:
        raise FedncaError(f"table '{path}' cannot be read ({error}); give a CSV file with commas") from error


def _read_parquet(path: Path) -> list[list[str]]:
    parquet = needed("pyarrow.parquet", "parquet", f"table '{path}'", ", or save the table as CSV")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise FedncaError(f"table '{path}' cannot be read ({reason}); give a Parquet file") from error
    columns = [column.to_pylist() for column in table.columns]
    return [table.column_names, *([_as_text(value) for value in row] for row in zip(*columns, strict=True))]


def _as_text(value: object) -> str:
    """Return a typed cell as CSV text; whole numbers may be stored as floats if other cells are missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return str(value)


def find_table(options: Options, root: Path) -> Path:
    """Return the table's path: the one that the user chose, else one with a default name."""
    names = (options.table,) if options.table else TABLES
    for name in names:
        if (root / name).is_file():
            return root / name
    raise FedncaError(f"table '{root / names[0]}' is not there; put it there, or name another with the option `table`")


def find_images(options: Options, root: Path) -> Path:
    """Return the folder that image paths start from."""
    if options.image_folder is None:
        return root / "images" if (root / "images").is_dir() else root
    if not (root / options.image_folder).is_dir():
        raise FedncaError(f"image_folder '{root / options.image_folder}' is not there; name a folder below '{root}'")
    return root / options.image_folder


def find_column(table: Table, option: str, chosen: str | None, usual: Sequence[str]) -> str | None:
    """Return the column that the user chose, else the first of the usual ones, whatever its case."""
    if chosen is not None:
        if chosen not in table.header:
            have = ", ".join(table.header)
            raise FedncaError(f"{option} '{chosen}' is not in table '{table.path}'; its columns are {have}")
        return chosen
    by_name = {name.lower(): name for name in reversed(table.header)}
    return next((by_name[name] for name in usual if name in by_name), None)


def read_labels(table: Table, options: Options, taken: set[str | None]) -> tuple[tuple[str, ...], NDArray[np.int8]]:
    """Read the classes, and the labels of every row, (N, C)."""
    label = find_column(table, "label_column", options.label_column, ())
    if label is None:
        columns = [name for name in table.header if name and name not in taken]
        known = {name: _zero_one(table, name) for name in options.classes or columns if name in columns}
    else:
        named = [{name.strip() for name in cell.split(options.separator)} - {""} for cell in table.column(label)]
        known = {name: np.array([name in own for own in named], np.int8) for name in sorted(set().union(*named))}
    classes = tuple(known) if options.classes is None else tuple(options.classes)
    if len(set(classes)) < len(classes):
        raise FedncaError(f"classes {', '.join(classes)} have a duplicate; name each class once")
    if not known.keys() & set(classes):
        have = ", ".join(table.header)
        raise FedncaError(f"table '{table.path}' has no class column among {have}; add one, or set label_column")
    unknown = np.full(len(table.rows), -1, np.int8)
    return classes, np.stack([known.get(name, unknown) for name in classes], axis=1)


def _zero_one(table: Table, name: str) -> NDArray[np.int8]:
    values = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "": -1}  # pandas writes floats if a label is missing
    cells = table.column(name)
    for number, cell in zip(table.numbers, cells, strict=True):
        if cell not in values:
            raise FedncaError(
                f"table '{table.path}' row {number} has '{cell}' in column '{name}'; "
                "write 0, 1 or nothing, or choose the class columns with the option `classes`"
            )
    return np.array([values[cell] for cell in cells], np.int8)


def image_paths(table: Table, column: str, folder: Path) -> list[Path]:
    """Return the image file of every row; it must be below the folder, and no two rows may name the same."""
    seen: dict[str, int] = {}
    for number, cell in zip(table.numbers, table.column(column), strict=True):
        inside = os.path.normpath(cell)
        where = f"table '{table.path}' row {number}"
        if Path(inside).is_absolute() or Path(inside).parts[:1] in [(), (os.pardir,)]:
            raise FedncaError(f"{where} has the image path '{cell}'; give a path below '{folder}'")
        if inside in seen:
            raise FedncaError(f"{where} repeats the image '{cell}' of row {seen[inside]}; keep one row per image")
        if not (folder / inside).is_file():
            raise FedncaError(f"{where} names '{folder / inside}', which is not there; add it or remove the row")
        seen[inside] = number
    return [folder / inside for inside in seen]


def parts_of(table: Table, column: str | None) -> list[str]:
    """Return each row's part: train, val or test; without a split column, all rows are for training."""
    if column is None:
        return ["train"] * len(table.rows)
    cells = table.column(column)
    for number, cell in zip(table.numbers, cells, strict=True):
        if cell.lower() not in PARTS:
            known = ", ".join(PARTS)
            raise FedncaError(f"table '{table.path}' row {number} has split '{cell}'; write one of {known}")
    return [PARTS[cell.lower()] for cell in cells]


def numbered(table: Table, column: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the distinct values of a column, and which of them each row has."""
    cells = table.column(column)
    if "" in cells:
        number = table.numbers[cells.index("")]
        raise FedncaError(f"table '{table.path}' row {number} has no {column}; fill it in for every row")
    names, which = np.unique(cells, return_inverse=True)
    return tuple(names.tolist()), which.astype(np.int64)


def _rows(everything: Split, parts: NDArray[np.str_], options: Options) -> dict[str, NDArray[np.intp]]:
    """Return the rows of each part; if none are for test, set some of the training rows aside."""
    rows = {part: np.flatnonzero(parts == part) for part in ("train", "val", "test")}
    if len(rows["train"]) and not len(rows["test"]):
        train = _take(everything, rows["train"])
        by_site = train.sites is not None
        stay, aside = hold_out(train, options.test_fraction, options.seed, by_site=by_site, purpose="hold out test")
        rows["train"], rows["test"] = rows["train"][stay], rows["train"][aside]
    return rows


def _take(everything: Split, rows: NDArray[np.intp]) -> Split:
    assert isinstance(everything.images, FileImages)
    images = FileImages(tuple(everything.images.paths[row] for row in rows))
    groups, sites = (None if numbers is None else numbers[rows] for numbers in (everything.groups, everything.sites))
    return Split(images, everything.labels[rows], groups, sites)


def _check_groups(table: Table, column: str, parts: NDArray[np.str_], groups: NDArray[np.int64]) -> None:
    """Refuse a group with images in two splits: the model would be tested on what it was trained on."""
    _, first, unit = np.unique(groups, return_index=True, return_inverse=True)
    strays = np.flatnonzero(parts != parts[first][unit])
    if len(strays):
        row, other = int(strays[0]), int(first[unit[strays[0]]])
        raise FedncaError(
            f"table '{table.path}' has {column} '{table.column(column)[row]}' in {parts[other]} "
            f"(row {table.numbers[other]}) and in {parts[row]} (row {table.numbers[row]}); put it in one split"
        )
