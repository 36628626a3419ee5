"""COCO 2017: photographs labelled with 80 kinds of objects, read from its official JSON annotations."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fednca.data.fetch import Archive, Progress, obtain
from fednca.data.layout import require, require_files
from fednca.data.types import Dataset, FileImages, Split
from fednca.errors import FedncaError
from fednca.options import Options as BaseOptions

SUMMARY = "photographs of COCO 2017, 80 classes; train2017 is for training, val2017 for test; crowds of objects count"
SIZE = "117,266 train / 4,952 test images"
LICENCE = "annotations CC BY 4.0, images Flickr terms of use"
OBTAINED = "downloaded: train2017.zip, val2017.zip and annotations_trainval2017.zip, 20 GB"
# fmt: off
CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee",
    "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard",
    "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple",
    "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "mouse", "remote", "keyboard", "cell phone",
    "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear",
    "hair drier", "toothbrush",
)
# fmt: on

HOST = "http://images.cocodataset.org"
ARCHIVES = (
    Archive(
        "annotations_trainval2017.zip",
        f"{HOST}/annotations/annotations_trainval2017.zip",
        "md5:f4bbac642086de4f52a3fdda2de5fa2c",
        "annotations",
    ),
    Archive("val2017.zip", f"{HOST}/zips/val2017.zip", "md5:442b8da7639aecaf257c1dceb8ba8c80", "val2017"),
    Archive("train2017.zip", f"{HOST}/zips/train2017.zip", "md5:cced6f7f71b7629ddf16f17bbcfab6b2", "train2017"),
)
NEEDED = {
    "annotations/instances_train2017.json": "annotations_trainval2017.zip",
    "annotations/instances_val2017.json": "annotations_trainval2017.zip",
    "train2017": "train2017.zip",
    "val2017": "val2017.zip",
}
REPLACE = "replace it with the file of annotations_trainval2017.zip"


class Options(BaseOptions):
    """Which images are used."""

    keep_unlabelled: bool = False
    """Keep the images that show none of the 80 classes, about one in a hundred."""


def missing(root: Path) -> list[str]:
    """Return the missing annotations and folders."""
    return [f"'{root / name}' (of {archive})" for name, archive in NEEDED.items() if not (root / name).exists()]


def prepare(root: Path, progress: Progress) -> None:
    """Download the missing annotations and images."""
    for archive in ARCHIVES:
        obtain(archive, root, progress)
    require("coco", root, missing)


def load(options: Options, root: Path | None) -> Dataset:
    """Use train2017 for training and val2017 for test, since the labels of test2017 are not public."""
    root = require("coco", root, missing)
    train, test = (_split(root, part, options.keep_unlabelled) for part in ("train2017", "val2017"))
    return Dataset("coco", CLASSES, train, None, test)


def read_annotations(path: Path) -> tuple[list[str], NDArray[np.int8]]:
    """Read an instances file: the images' file names, and their labels (N, 80); crowds count like single objects."""
    content = _parse(path)
    files = _by_id(content, "images", "file_name", path)
    categories = _by_id(content, "categories", "name", path)
    unknown = sorted(set(categories.values()) - set(CLASSES))
    if unknown:
        raise FedncaError(f"'{path}' has a category '{unknown[0]}' that is not one of COCO's 80; {REPLACE}")
    rows = {number: row for row, number in enumerate(files)}
    columns = {number: CLASSES.index(name) for number, name in categories.items()}
    labels = np.zeros((len(rows), len(CLASSES)), np.int8)
    for position, annotation in enumerate(content["annotations"]):
        try:
            labels[rows[annotation["image_id"]], columns[annotation["category_id"]]] = 1
        except (KeyError, TypeError) as error:
            raise FedncaError(
                f"annotations[{position}] of '{path}' names an image or category that the file lacks; {REPLACE}"
            ) from error
    return list(files.values()), labels


def _split(root: Path, part: str, keep_unlabelled: bool) -> Split:
    names, labels = read_annotations(root / "annotations" / f"instances_{part}.json")
    kept = np.flatnonzero(labels.any(axis=1) | keep_unlabelled)
    paths = require_files(root / part, [names[row] for row in kept])
    return Split(FileImages(paths), labels[kept])


def _parse(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedncaError(f"'{path}' cannot be read as JSON ({error}); {REPLACE}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise FedncaError(f"'{path}' has no list '{key}'; {REPLACE}")
    return cast(dict[str, list[dict[str, Any]]], content)


def _by_id(content: dict[str, list[dict[str, Any]]], key: str, field: str, path: Path) -> dict[int, str]:
    """Return one field of each entry of a list, by the entry's id."""
    found: dict[int, str] = {}
    for position, entry in enumerate(content[key]):
        match entry:
            case {"id": int(number), **rest} if number not in found and isinstance(rest.get(field), str):
                found[number] = rest[field]
            case _:
                raise FedncaError(f"{key}[{position}] of '{path}' has no {field} or no id of its own; {REPLACE}")
    return found
