import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import VOCDetection

from fednca.data.sources.voc import CLASSES, Options, load, missing, prepare, read_annotation
from fednca.errors import FedncaError

IMAGES = {
    "train": {"2008_000008": ["horse", "person"], "2008_000015": ["bottle", "bottle"], "2008_000019": ["dog"]},
    "val": {"2008_000002": ["tvmonitor"], "2008_000003": ["train", "person", "aeroplane"]},
}


def annotation(objects: list[str]) -> str:
    """Write what the official annotations have; the last object is 'difficult', a person has a head."""
    text = "<annotation><folder>VOC2012</folder><size><width>9</width><height>9</height><depth>3</depth></size>"
    for number, name in enumerate(objects, start=1):
        part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>" if name == "person" else ""
        difficult = int(number == len(objects))
        text += f"<object><name>{name}</name><difficult>{difficult}</difficult>{part}</object>"
    return text + "</annotation>"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "VOCdevkit/VOC2012"
    for below in ("ImageSets/Main", "Annotations", "JPEGImages"):
        (folder / below).mkdir(parents=True)
    for part, images in IMAGES.items():
        (folder / f"ImageSets/Main/{part}.txt").write_text("".join(f"{name}\n" for name in images))
        for name, objects in images.items():
            (folder / f"Annotations/{name}.xml").write_text(annotation(objects))
            Image.new("RGB", (9, 9)).save(folder / f"JPEGImages/{name}.jpg")
    return tmp_path


def reference_torchvision(root, part: str) -> tuple[list[str], list[set[str]]]:
    """Read the same files with torchvision."""
    reference = VOCDetection(str(root), year="2012", image_set=part)
    objects = [target["annotation"]["object"] for _, target in reference]
    return reference.images, [{item["name"] for item in found} for found in objects]


@pytest.mark.parametrize("part", ["train", "val"])
def test_images_and_labels_are_those_torchvision_reads(root, part):
    dataset = load(Options(), root)
    split = dataset.train if part == "train" else dataset.test
    images, objects = reference_torchvision(root, part)
    assert [str(path) for path in split.images.paths] == images
    assert [{CLASSES[c] for c in np.flatnonzero(row)} for row in split.labels] == objects
    assert dataset.val is None


def test_the_classes_are_the_official_ones_in_order():
    assert len(CLASSES) == 20
    assert list(CLASSES) == sorted(CLASSES)


@pytest.mark.parametrize("below", ["VOCdevkit", "VOCdevkit/VOC2012"])
def test_folders_further_inside_are_roots_too(root, below):
    assert missing(root / below) == []
    assert len(load(Options(), root / below).train) == 3


@pytest.mark.parametrize("name", ["ImageSets/Main/val.txt", "JPEGImages", "Annotations"])
def test_what_is_missing_is_named_with_its_archive(root, name):
    path = root / "VOCdevkit/VOC2012" / name
    path.rename(root / "elsewhere")
    assert missing(root) == [f"'{path}' (of VOCtrainval_11-May-2012.tar)"]
    for act in (lambda: load(Options(), root), lambda: prepare(root, print)):
        with pytest.raises(FedncaError, match=rf"voc lacks '.*{name}' \(of VOCtrainval_11-May-2012\.tar\)"):
            act()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("JPEGImages/2008_000015.jpg", r"JPEGImages/2008_000015\.jpg' is missing"),
        ("Annotations/2008_000015.xml", r"Annotations/2008_000015\.xml' cannot be read \(No such file"),
    ],
)
def test_a_missing_image_or_annotation_is_named(root, name, sentence):
    (root / "VOCdevkit/VOC2012" / name).unlink()
    with pytest.raises(FedncaError, match=sentence):
        load(Options(), root)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("<annotation>\n<object>", r"a\.xml' is not plain XML \(.*line 2"),
        ("", r"a\.xml' is not plain XML \(no element found"),
        (annotation(["dog", "unicorn"]), r"object 2 of '.*a\.xml' is a 'unicorn'"),
        ("<annotation><object><pose/></object></annotation>", r"object 1 of '.*a\.xml' is a ''"),
    ],
)
def test_a_malformed_annotation_is_named_with_its_place(tmp_path, content, sentence):
    path = tmp_path / "a.xml"
    path.write_text(content)
    with pytest.raises(FedncaError, match=sentence):
        read_annotation(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize(
    "declared",
    [
        '<!DOCTYPE a [<!ENTITY b "dog">]>',
        '<!DOCTYPE a SYSTEM "file:///etc/hostname">',
        '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/hostname">]>',
    ],
)
def test_entities_are_refused_in_every_encoding(tmp_path, declared, encoding):
    text = f'<?xml version="1.0" encoding="{encoding}"?>{declared}' + annotation(["dog"])
    (tmp_path / "a.xml").write_bytes(text.encode(encoding))
    with pytest.raises(FedncaError, match=r"a\.xml' is not plain XML \(it declares a DOCTYPE\)"):
        read_annotation(tmp_path / "a.xml")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("2008_000008\n\n2008_000015\n2008_000008\n", r"train\.txt' names '2008_000008' twice, in lines 1 and 4"),
        ("\n \n", r"train\.txt' names no image"),
        (b"\xff\xfe\x00", r"train\.txt' cannot be read \(.*utf-8"),
    ],
)
def test_a_malformed_list_is_named_with_its_place(root, content, sentence):
    content = content if isinstance(content, bytes) else content.encode()
    (root / "VOCdevkit/VOC2012/ImageSets/Main/train.txt").write_bytes(content)
    with pytest.raises(FedncaError, match=sentence):
        load(Options(), root)
