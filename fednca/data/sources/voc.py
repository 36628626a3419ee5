"""PASCAL VOC 2012: photographs labelled with 20 kinds of objects, read from its official XML annotations."""

from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.config.options import Options as BaseOptions
from fednca.data.fetch import Archive, Progress, obtain
from fednca.data.layout import read_names, require, require_files
from fednca.data.types import Dataset, FileImages, Split

SUMMARY = "photographs of PASCAL VOC 2012, 20 classes; its val split is for test; 'difficult' objects count"
SIZE = "5,717 train / 5,823 test images"
LICENCE = "Flickr terms of use, for research"
OBTAINED = "downloaded: VOCtrainval_11-May-2012.tar, 2 GB"
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

ARCHIVE = Archive(
    "VOCtrainval_11-May-2012.tar",
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
    "md5:6cd6e144f989b92b3379bac3b3de84fd",
    "VOCdevkit",
)
NEEDED = ("ImageSets/Main/train.txt", "ImageSets/Main/val.txt", "Annotations", "JPEGImages")


class Options(BaseOptions):
    """VOC has no options."""


def missing(root: Path) -> list[str]:
    """Return the missing lists and folders."""
    folder = _folder(root)
    return [f"'{folder / name}' (of {ARCHIVE.name})" for name in NEEDED if not (folder / name).exists()]


def prepare(root: Path, progress: Progress) -> None:
    """Download the training and validation images of 2012."""
    if missing(root):
        obtain(ARCHIVE, root, progress)
    require("voc", root, missing)


def load(options: Options, root: Path | None) -> Dataset:
    """Use train for training and val for test; no third split has public labels."""
    folder = _folder(require("voc", root, missing))
    return Dataset("voc", CLASSES, _split(folder, "train"), None, _split(folder, "val"))


def read_annotation(path: Path) -> NDArray[np.int8]:
    """Read which classes an image shows, (20,); parts of an object (head, hand, foot) do not count."""
    try:
        annotation = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_PlainTree()))
    except OSError as error:
        raise FedncaError(f"'{path}' cannot be read ({error.strerror}); unpack {ARCHIVE.name} again") from error
    except (ElementTree.ParseError, _DoctypeError) as error:
        raise FedncaError(f"'{path}' is not plain XML ({error}); unpack {ARCHIVE.name} again") from error
    labels = np.zeros(len(CLASSES), np.int8)
    for number, item in enumerate(annotation.iterfind("object"), start=1):
        name = (item.findtext("name") or "").strip()
        if name not in CLASSES:
            raise FedncaError(
                f"object {number} of '{path}' is a '{name}', which is not one of the 20 classes; fix the file"
            )
        labels[CLASSES.index(name)] = 1
    return labels


class _DoctypeError(Exception):
    """An annotation declares a document type."""


class _PlainTree(ElementTree.TreeBuilder):
    """Refuses a DOCTYPE and so all entities: a few bytes of them can expand to gigabytes or read other files."""

    def doctype(self, name: str, pubid: str, system: str) -> NoReturn:
        raise _DoctypeError("it declares a DOCTYPE")


def _folder(root: Path) -> Path:
    candidates = (root / "VOCdevkit/VOC2012", root / "VOC2012", root)
    return next((folder for folder in candidates if (folder / "ImageSets").is_dir()), candidates[0])


def _split(folder: Path, part: str) -> Split:
    names = read_names(folder / "ImageSets/Main" / f"{part}.txt")
    paths = require_files(folder / "JPEGImages", [f"{name}.jpg" for name in names])
    labels = np.stack([read_annotation(folder / "Annotations" / f"{name}.xml") for name in names])
    return Split(FileImages(paths), labels)
