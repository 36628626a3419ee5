import csv
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import fednca.use.reading
from fednca.data.images import ImageError
from fednca.errors import FedncaError
from fednca.use.overlay import COLOURS, STRONGEST, overlay, shrink
from fednca.use.predict import Prediction, predict, to_csv, to_json
from fednca.use.reading import find_images, read_batches


@pytest.fixture
def mixed(image_folder, tmp_path):
    """Six sound images with two bad ones among them."""
    for name in ("0.png", "2.png", "4.png", "6.png", "8.png", "10.png"):
        shutil.copy(image_folder / name, tmp_path / name)
    (tmp_path / "3.png").write_bytes((image_folder / "2.png").read_bytes()[:60])
    (tmp_path / "5.png").write_text("nothing like an image")
    return tmp_path


def test_folders_are_searched_and_files_taken_as_they_are(image_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "A.JPG").write_text("")
    (tmp_path / "scan.dcm").write_text("")
    named = find_images([tmp_path / "notes.txt", tmp_path, tmp_path / "A.JPG", "no/such.file"])
    assert [path.name for path in named] == ["notes.txt", "A.JPG", "scan.dcm", "such.file"]
    found = find_images([image_folder])
    assert sorted(path.stem for path in found) == sorted(str(number) for number in range(12))
    assert found == sorted(found)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedncaError, match=r"empty' has no images; their names end in .*\.bmp, .*\.tiff"):
        find_images([tmp_path / "empty"])


@pytest.mark.parametrize("few", [0, 256])  # in all processes, and in this one
def test_batches_keep_the_order_and_set_bad_images_apart(mixed, monkeypatch, few):
    monkeypatch.setattr(fednca.use.reading, "FEW", few)
    paths = find_images([mixed])
    batches = list(read_batches(paths, 16, 3))
    rows = [row for batch in batches for row in batch.rows]
    failed = {row: error for batch in batches for row, error in batch.failed.items()}
    assert [paths[row].name for row in rows] == ["0.png", "10.png", "2.png", "4.png", "6.png", "8.png"]
    assert [paths[row].name for row in failed] == ["3.png", "5.png"]
    pixels = np.concatenate([batch.pixels for batch in batches])
    expected = [np.asarray(Image.open(paths[row]).convert("RGB")) for row in rows]
    np.testing.assert_array_equal(pixels, expected)


def test_predictions_are_the_models_in_the_order_of_the_files(model, mixed):
    paths = find_images([mixed])
    found = list(predict(model, paths, "0.52", batch_size=3))
    sound = [path for path in paths if path.name not in ("3.png", "5.png")]
    expected = model.probabilities(sound).tolist()
    assert [each.path for each in found] == paths
    predictions = [each for each in found if isinstance(each, Prediction)]
    assert [list(each.probabilities) for each in predictions] == [list(model.classes)] * 6
    for each, own in zip(predictions, expected, strict=True):
        assert list(each.probabilities.values()) == pytest.approx(own, abs=1e-6)
        assert each.labels == tuple(name for name, p in each.probabilities.items() if p > 0.52)
        assert each.likeliest() == model.classes[int(np.argmax(own))]
    problems = {each.path.name: each.problem for each in found if isinstance(each, ImageError)}
    assert "cut off" in problems["3.png"]
    assert "not an image of a known format" in problems["5.png"]


def test_calibrated_thresholds_decide_by_default(model, image_folder):
    for each in predict(model, find_images([image_folder])):
        pairs = zip(each.probabilities.items(), model.thresholds.tolist(), strict=True)
        assert each.labels == tuple(name for (name, p), t in pairs if p > t)


def test_json_and_csv_say_the_same(model, mixed):
    found = list(predict(model, find_images([mixed])))
    sound = [each for each in found if isinstance(each, Prediction)]
    failed = [each for each in found if isinstance(each, ImageError)]
    facts = json.loads(to_json(model, "calibrated", sound, failed))
    rows = list(csv.DictReader(io.StringIO(to_csv(model.classes, sound))))
    assert [row["image"] for row in rows] == [each["image"] for each in facts["images"]]
    for row, each in zip(rows, facts["images"], strict=True):
        assert row["labels"].split("|") == (each["labels"] or [""])
        assert {name: float(row[name]) for name in model.classes} == each["probabilities"]
    assert facts["thresholds"] == dict(zip(model.classes, model.thresholds.tolist(), strict=True))
    assert [each["image"] for each in facts["unreadable"]] == [str(mixed / "3.png"), str(mixed / "5.png")]
    assert (facts["round"], facts["finished"]) == (model.round, True)


def test_evidence_is_drawn_for_what_is_found_and_else_for_the_likeliest(model, tmp_path):
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (30, 50, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "wide.png")
    (tmp_path / "out").mkdir()
    for threshold, number in (("0", 10), ("1", 1)):
        (each,) = predict(model, [tmp_path / "wide.png"], threshold, evidence=tmp_path / "out")
        assert list(each.evidence) == list(each.labels or [each.likeliest()])
        assert len(each.evidence) == number
        for name, file in each.evidence.items():
            drawn = np.asarray(Image.open(file))
            pixels = np.asarray(Image.fromarray(picture).resize((16, 16), Image.Resampling.BILINEAR))
            heat = model.evidence(pixels[None], [model.classes.index(name)])[0, 0]
            np.testing.assert_array_equal(drawn, overlay(picture, heat))
            assert (drawn != picture).any()


def test_an_overlay_mixes_picture_and_colour_by_heat():
    picture = np.full((4, 6, 3), 100, np.uint8)
    np.testing.assert_array_equal(overlay(picture, np.zeros((2, 2), np.float32)), picture)
    hottest = (1 - STRONGEST) * 100 + STRONGEST * np.array(COLOURS[-1])
    np.testing.assert_array_equal(
        overlay(picture, np.ones((2, 3), np.float32)), np.broadcast_to(np.rint(hottest), (4, 6, 3))
    )
    half = (1 - STRONGEST / 2) * 100 + STRONGEST / 2 * np.array(COLOURS[2])
    np.testing.assert_array_equal(overlay(picture, np.full((1, 1), 0.5, np.float32))[2, 3], np.rint(half))


def test_large_pictures_shrink_and_small_ones_stay():
    assert shrink(np.zeros((3000, 1500, 3), np.uint8)).shape == (1024, 512, 3)
    small = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    np.testing.assert_array_equal(shrink(small), small)
