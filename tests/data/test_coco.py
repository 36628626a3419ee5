import json
import time

import numpy as np
import pytest

from fednca.data.sources.coco import CLASSES, Options, load, missing, prepare, read_annotations
from fednca.errors import FedncaError

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 90, "name": "toothbrush"}]
OBJECTS = {  # image → [(category, crowd)]
    "train2017": {30: [(18, 0), (18, 0)], 9: [], 25: [(90, 0), (1, 1)]},
    "val2017": {7: [(1, 0)], 8: []},
}


def instances(objects: dict[int, list[tuple[int, int]]]) -> dict[str, list[dict[str, object]]]:
    pairs = [(image, *found) for image in objects for found in objects[image]]
    return {
        "images": [{"id": image, "file_name": f"{image:012}.jpg", "height": 4, "width": 4} for image in objects],
        "annotations": [
            {"id": number, "image_id": image, "category_id": category, "iscrowd": crowd, "bbox": [0, 0, 1, 1]}
            for number, (image, category, crowd) in enumerate(reversed(pairs))
        ],
        "categories": CATEGORIES,
    }


@pytest.fixture
def root(tmp_path):
    (tmp_path / "annotations").mkdir()
    for part, objects in OBJECTS.items():
        (tmp_path / part).mkdir()
        (tmp_path / f"annotations/instances_{part}.json").write_text(json.dumps(instances(objects)))
        for image in objects:
            (tmp_path / part / f"{image:012}.jpg").touch()
    return tmp_path


def named(labels: np.ndarray) -> list[set[str]]:
    return [{CLASSES[c] for c in np.flatnonzero(row)} for row in labels]


def test_objects_and_crowds_become_labels_of_their_image(root):
    dataset = load(Options(), root)
    assert dataset.val is None
    assert dataset.train.images.paths == tuple(root / f"train2017/{image:012}.jpg" for image in (30, 25))
    assert named(dataset.train.labels) == [{"dog"}, {"person", "toothbrush"}]
    assert dataset.test.images.paths == (root / "val2017/000000000007.jpg",)
    assert named(dataset.test.labels) == [{"person"}]


def test_images_without_a_label_stay_when_asked_for(root):
    dataset = load(Options(keep_unlabelled=True), root)
    assert named(dataset.train.labels) == [{"dog"}, set(), {"person", "toothbrush"}]
    assert len(dataset.test) == 2


@pytest.mark.parametrize(
    ("name", "archive"),
    [("annotations/instances_val2017.json", "annotations_trainval2017.zip"), ("train2017", "train2017.zip")],
)
def test_what_is_missing_is_named_with_its_archive(root, name, archive):
    (root / name).rename(root / "elsewhere")
    assert missing(root) == [f"'{root / name}' (of {archive})"]
    with pytest.raises(FedncaError, match=rf"coco lacks '.*{name}' \(of {archive}\)"):
        load(Options(), root)


def test_a_folder_that_stands_is_not_downloaded_again(root):
    (root / "annotations/instances_val2017.json").unlink()
    with pytest.raises(FedncaError, match=r"coco lacks '.*instances_val2017\.json'"):
        prepare(root, print)


def test_a_missing_image_is_named_and_the_others_counted(root):
    for image in (30, 25):
        (root / f"train2017/{image:012}.jpg").unlink()
    with pytest.raises(FedncaError, match=r"train2017/000000000030\.jpg' is missing \(and 1 more of the 2"):
        load(Options(), root)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.pop("images"), "has no list 'images'"),
        (lambda c: c.update(annotations={}), "has no list 'annotations'"),
        (lambda c: c["images"][1].pop("file_name"), r"images\[1\] of .* has no file_name or no id of its own"),
        (lambda c: c["images"][1].update(id=7), r"images\[1\] of .* has no file_name or no id of its own"),
        (lambda c: c["images"].append(3), r"images\[2\] of .* has no file_name or no id of its own"),
        (lambda c: c["categories"][2].update(name="unicorn"), "has a category 'unicorn'"),
        (lambda c: c["annotations"][0].update(image_id=99), r"annotations\[0\] of .* names an image or category that"),
        (lambda c: c["annotations"][0].update(category_id=[1]), r"annotations\[0\] of .* that the file lacks"),
        (lambda c: c["annotations"].append(None), r"annotations\[1\] of .* names an image or category that"),
    ],
)
def test_malformed_annotations_are_named_with_their_place(tmp_path, change, sentence):
    content = json.loads(json.dumps(instances(OBJECTS["val2017"])))
    change(content)
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FedncaError, match=sentence) as caught:
        read_annotations(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"images": [\n{"id": 1', b"\xff\xfe\x80", b"[]"])
def test_a_file_that_is_no_such_json_is_named(tmp_path, content):
    path = tmp_path / "instances.json"
    path.write_bytes(content)
    with pytest.raises(FedncaError, match=r"instances\.json' (cannot be read as JSON|has no list)"):
        read_annotations(path)


def test_annotations_by_the_ten_thousands_are_read_at_once(tmp_path):
    rng = np.random.default_rng(0)
    objects = {image: [] for image in range(12_000)}
    for image, category in zip(rng.integers(0, 12_000, 86_000).tolist(), rng.choice([1, 18, 90], 86_000), strict=True):
        objects[image].append((int(category), 0))
    path = tmp_path / "instances.json"  # a tenth of train2017, without its polygons
    path.write_text(json.dumps(instances(objects)))
    started = time.monotonic()
    names, labels = read_annotations(path)
    assert time.monotonic() - started < 3
    assert len(names) == 12_000
    expected = {(image, category) for image, found in objects.items() for category, _ in found}
    assert labels.sum() == len(expected)


@pytest.mark.data
def test_the_classes_are_in_the_order_of_the_real_categories(data_folder):
    content = json.loads((data_folder / "coco/annotations/instances_val2017.json").read_text())
    categories = sorted(content["categories"], key=lambda category: category["id"])
    assert [category["name"] for category in categories] == list(CLASSES)


@pytest.mark.data
@pytest.mark.parametrize(("part", "images"), [("train2017", 5000), ("val2017", 1200)])
def test_the_real_sample_has_its_images_and_class_counts(data_folder, part, images):
    """Count, class by class, the different images that the annotations name."""
    dataset = load(Options(), data_folder / "coco")
    split = dataset.train if part == "train2017" else dataset.test
    assert len(split) == images
    assert all(path.is_file() for path in split.images.paths[::97])
    content = json.loads((data_folder / f"coco/annotations/instances_{part}.json").read_text())
    pairs = {(item["category_id"], item["image_id"]) for item in content["annotations"]}
    numbers = {category["name"]: category["id"] for category in content["categories"]}
    counts = [sum(number == numbers[name] for number, _ in pairs) for name in CLASSES]
    assert split.labels.sum(axis=0, dtype=int).tolist() == counts
