"""NIH ChestX-ray14: chest radiographs with 14 findings, grouped by patient."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.config.options import Options as BaseOptions
from fednca.data.fetch import Archive, Progress, obtain
from fednca.data.layout import read_names, read_table, require
from fednca.data.types import Dataset, FileImages, Split

SUMMARY = "chest radiographs of NIH ChestX-ray14, 14 classes, grouped by patient"
SIZE = "86,524 train / 25,596 test images by the official lists"
LICENCE = "free use; the NIH Clinical Center asks for credit and a citation of Wang et al. (2017)"
OBTAINED = "images are downloaded, 45 GB; fetch the tables by hand from nihcc.app.box.com/v/ChestXray-NIHCC"
CLASSES = (
    "Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax",
    "Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia",
)  # fmt: skip
NO_FINDING = "No Finding"
COLUMNS = (*CLASSES, NO_FINDING)

ENTRIES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
LISTS = {"train": "train_val_list.txt", "test": "test_list.txt"}
LONG_TAIL = {part: f"miccai2023_nih-cxr-lt_labels_{part}.csv" for part in ("train", "val", "test")}

# For each archive of images, the name of its shared file and the MD5 that NIH publishes.
BOX = (
    ("vfk49d74nhbxq3nqjg0900w5nvkorp5c", "fe8ed0a6961412fddcbb3603c11b3698"),
    ("i28rlmbvmfjbl8p2n3ril0pptcmcu9d1", "ab07a2d7cbe6f65ddd97b4ed7bde10bf"),
    ("f1t00wrtdk94satdfb9olcolqx20z2jp", "2301d03bde4c246388bad3876965d574"),
    ("0aowwzs5lhjrceb3qp67ahp0rd1l1etg", "9f1b7f5aae01b13f4bc8e2c44a4b8ef6"),
    ("v5e3goj22zr6h8tzualxfsqlqaygfbsn", "1861f3cd0ef7734df8104f2b0309023b"),
    ("asi7ikud9jwnkrnkj99jnpfkjdes7l6l", "456b53a8b351afd92a35bc41444c58c8"),
    ("jn1b4mw4n6lnh74ovmcjb8y48h8xj07n", "1075121ea20a137b87f290d6a4a5965e"),
    ("tvpxmn7qyrgl0w8wfh9kqfjskv6nmm1j", "b61f34cec3aa69f295fbb593cbd9d443"),
    ("upyy3ml7qdumlgk2rfcvlb9k6gvqq2pj", "442a3caa61ae9b64e61c561294d1e183"),
    ("l6nilvfa9cg3s28tqv1qc1olm3gnz54p", "09ec81c4c31e32858ad8cf965c494b74"),
    ("hhq8fkdgvcari67vfhs7ppg2w6ni4jze", "499aefc67207a5a97692424cf5dbeed5"),
    ("ioqwiy20ihqwyr8pf4c24eazhh281pbu", "dc9fda1757c2de0032b63347a7d2895c"),
)
ARCHIVES = tuple(
    Archive(
        f"images_{number:03}.tar.gz",
        f"https://nihcc.box.com/shared/static/{shared}.gz",
        f"md5:{md5}",
        f"images_{number:03}",
        inner=".",  # every archive holds a folder called images
    )
    for number, (shared, md5) in enumerate(BOX, start=1)
)


class Options(BaseOptions):
    """Which classes are predicted, and which images are used."""

    no_finding: bool = False
    """Also predict 'No Finding', as a 15th class."""
    missing_images: Literal["fail", "skip"] = "fail"
    """What to do about images that are in the tables but in no folder: stop with an error, or leave them out."""


Row = tuple[int, str, str, set[str]]
"""Line number, image name, patient, findings."""


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a table: image names, labels (n, 15) with 'No Finding' last, and patients (n,)."""

    names: list[str]
    labels: NDArray[np.int8]
    patients: NDArray[np.int64]


def missing(root: Path) -> list[str]:
    """Return the missing tables; if there are none, say how many images are missing."""
    tables = missing_tables(root)
    if tables:
        return tables
    try:
        names = [name for table in read_splits(root).values() for name in table.names]
    except FedncaError:
        return []  # nothing is missing; `load` says what is wrong with the tables
    there = find_images(root)
    absent = [name for name in names if name not in there]
    if not absent:
        return []
    first = root / "images_001/images" / absent[0]
    return [f"{len(absent)} of {len(names)} images, such as '{first}' (of images_*.tar.gz)"]


def missing_tables(root: Path) -> list[str]:
    """Return the missing tables: of the MICCAI 2023 ones if at least one of them is there, else of NIH's own."""
    if (folder := _long_tail_folder(root)) is not None:
        return [f"'{folder / name}' (beside the others)" for name in LONG_TAIL.values() if not (folder / name).exists()]
    wanted = [name for name in LISTS.values() if not (root / name).exists()]
    if not any((root / name).exists() for name in ENTRIES):
        wanted.insert(0, ENTRIES[0])
    return [f"'{root / name}' (from nihcc.app.box.com/v/ChestXray-NIHCC)" for name in wanted]


def prepare(root: Path, progress: Progress) -> None:
    """Download the images; the tables, which can only be fetched by hand, must already be there."""
    tables = missing_tables(root)
    if tables:
        raise FedncaError(f"chestxray14 lacks {', '.join(tables)}; put them there by hand, then run this again")
    if missing(root):
        for archive in ARCHIVES:
            obtain(archive, root, progress)
    require("chestxray14", root, missing)


def load(options: Options, root: Path | None) -> Dataset:
    """Read the MICCAI 2023 (NIH-CXR-LT) splits if their tables are there, else NIH's official lists (no val)."""
    root = require("chestxray14", root, missing_tables)
    tables = read_splits(root)
    folders = find_images(root)
    splits = {part: _split(table, part, root, folders, options) for part, table in tables.items()}
    classes = COLUMNS if options.no_finding else CLASSES
    return Dataset("chestxray14", classes, splits["train"], splits.get("val"), splits["test"])


def read_splits(root: Path) -> dict[str, Table]:
    """Read the tables of all splits, and refuse a patient who is in two of them."""
    folder = _long_tail_folder(root)
    if folder is not None:
        tables = {part: read_long_tail(folder / name) for part, name in LONG_TAIL.items()}
    else:
        entries = read_entries(next(root / name for name in ENTRIES if (root / name).exists()))
        tables = {part: _listed(entries, root / name) for part, name in LISTS.items()}
    for one, other in combinations(tables, 2):
        shared = np.intersect1d(tables[one].patients, tables[other].patients)
        if len(shared):
            raise FedncaError(
                f"patient {shared[0]} is in both {one} and {other} of '{folder or root}' "
                f"(and {len(shared) - 1} more); use the official splits, which share no patient"
            )
    return tables


def read_entries(path: Path) -> Table:
    """Read NIH's table of all images, in its version of 2017 or of 2020."""

    def rows() -> Iterator[Row]:
        for line, (name, findings, patient) in read_table(path, ("Image Index", "Finding Labels", "Patient ID")):
            found = set(findings.split("|"))
            if unknown := sorted(found.difference(COLUMNS)):
                raise FedncaError(f"'{path}' line {line} has the unknown finding '{unknown[0]}'; fix the line")
            yield line, name, patient, found

    return _table(rows(), path)


def read_long_tail(path: Path) -> Table:
    """Read a MICCAI 2023 table, which has one column per finding; keep the 14 findings and 'No Finding'."""

    def rows() -> Iterator[Row]:
        for line, (name, patient, *cells) in read_table(path, ("id", "subj_id", *COLUMNS)):
            values = dict(zip(COLUMNS, cells, strict=True))
            for column, cell in values.items():
                if cell not in {"0", "1", "0.0", "1.0"}:
                    raise FedncaError(f"'{path}' line {line} has '{cell}' for {column}; give 0 or 1")
            yield line, name, patient, {column for column, cell in values.items() if float(cell)}

    return _table(rows(), path)


def find_images(root: Path) -> dict[str, Path]:
    """Return the folder of every image by its name: `images_*/images`, `images`, or the root itself."""
    folders = (*sorted(root.glob("images_*/images")), root / "images", root)
    return {name: folder for folder in reversed(folders) if folder.is_dir() for name in os.listdir(folder)}  # noqa: PTH208


def _long_tail_folder(root: Path) -> Path | None:
    """Return the folder of the MICCAI 2023 tables: the root, or the folder in which NIH shares them."""
    folders = (root, root / "PruneCXR")
    return next((folder for folder in folders for name in LONG_TAIL.values() if (folder / name).exists()), None)


def _table(rows: Iterable[Row], path: Path) -> Table:
    findings: dict[str, set[str]] = {}
    patients: list[int] = []
    for line, name, patient, found in rows:
        if name in findings:
            raise FedncaError(f"'{path}' line {line} repeats the image '{name}'; remove the line")
        if not patient.isdecimal():
            raise FedncaError(f"'{path}' line {line} has the patient '{patient}'; give a number")
        findings[name] = found
        patients.append(int(patient))
    if not findings:
        raise FedncaError(f"'{path}' has no rows; replace it with the official table")
    labels = np.array([[column in found for column in COLUMNS] for found in findings.values()], np.int8)
    return Table(list(findings), labels, np.array(patients, np.int64))


def _listed(entries: Table, path: Path) -> Table:
    """Return the entries that a list names, in the list's order."""
    places = {name: row for row, name in enumerate(entries.names)}
    names = read_names(path)
    if unknown := [name for name in names if name not in places]:
        raise FedncaError(
            f"'{path}' names '{unknown[0]}', which the table of entries lacks; use NIH's official list and table"
        )
    rows = [places[name] for name in names]
    return Table(names, entries.labels[rows], entries.patients[rows])


def _split(table: Table, part: str, root: Path, folders: dict[str, Path], options: Options) -> Split:
    rows = [row for row, name in enumerate(table.names) if name in folders]
    absent = len(table.names) - len(rows)
    if absent and (options.missing_images == "fail" or not rows):
        first = next(name for name in table.names if name not in folders)
        raise FedncaError(
            f"{absent} of {len(table.names)} {part} images are not below '{root}', the first is '{first}'; "
            f"unpack images_*.tar.gz there, or set missing_images to 'skip'"
        )
    paths = tuple(folders[table.names[row]] / table.names[row] for row in rows)
    classes = len(COLUMNS if options.no_finding else CLASSES)
    return Split(FileImages(paths), table.labels[rows, :classes], table.patients[rows])
