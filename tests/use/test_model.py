import shutil

import numpy as np
import pytest
import torch
from helpers import Stop, StopAfter, tiny
from older_runs import age
from PIL import Image

from fednca.base.errors import FedncaError
from fednca.data.store import open_store
from fednca.data.types import FileImages
from fednca.engines.scoring import predict
from fednca.engines.workplace import build_workplace
from fednca.runs import Run, resume, train
from fednca.use.model import TrainedModel, to_pixels


@pytest.mark.parametrize("method", ["fednca-ml", "spherefed", "fedlgt"])
def test_probabilities_are_those_of_the_run(run_of, method, test_images):
    run = run_of(method)
    job = build_workplace(run.config, run.method, run.federation, run.model("final"), torch.device("cpu"))
    expected = predict(job.method, job.model, job.test, 256, run.config.train)
    found = TrainedModel(run).probabilities(list(test_images), batch_size=256)
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=0)


def test_files_pictures_and_arrays_are_the_same(model, test_images, image_folder):
    files = [image_folder / "0.png", str(image_folder / "more/1.png")]
    expected = model.probabilities(list(test_images[:2]))
    torch.testing.assert_close(model.probabilities(files), expected, rtol=0, atol=0)
    pictures = [Image.fromarray(image) for image in test_images[:2]]
    torch.testing.assert_close(model.probabilities(pictures), expected, rtol=0, atol=0)
    torch.testing.assert_close(model.probabilities(files, batch_size=1), expected)
    assert model.probabilities([]).shape == (0, 10)


def test_large_images_are_squashed_as_in_training(tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "wide.jpg")
    Image.fromarray(rng.integers(0, 256, (40, 60), np.uint8)).save(tmp_path / "grey.png")
    paths = (tmp_path / "wide.jpg", tmp_path / "grey.png")
    stored = open_store(FileImages(paths), 16, folder=tmp_path / "store").images.take(np.arange(2))
    for path, expected in zip(paths, stored, strict=True):
        np.testing.assert_array_equal(to_pixels(path, 16), expected)
        np.testing.assert_array_equal(to_pixels(Image.open(path), 16), expected)


def test_thresholds_are_those_of_the_results(model):
    assert model.calibrated
    assert model.thresholds.tolist() == model.run.results["val"]["calibrated"]["thresholds"]
    assert model.thresholds_by("calibrated") is model.thresholds
    assert model.thresholds_by("0.25").tolist() == [0.25] * 10
    for wrong in ("low", "1.5", "nan", "-0.1"):
        with pytest.raises(FedncaError, match=f"threshold '{wrong}' is neither 'calibrated' nor a number from 0 to 1"):
            model.thresholds_by(wrong)


@pytest.mark.parametrize(("normalize", "mean"), [("half", [0.5, 0.5, 0.5]), ("imagenet", [0.485, 0.456, 0.406])])
def test_normalisation_is_the_runs(tmp_path, normalize, mean):
    run = train(tiny(train__rounds=1, data__normalize=normalize), tmp_path / "run")
    found, std = TrainedModel(run).moments()
    assert found == mean
    pixels = np.full((1, 16, 16, 3), 255, np.uint8)
    white = TrainedModel(run).normalise(pixels)[0, :, 0, 0]
    assert white.tolist() == pytest.approx([(1 - m) / s for m, s in zip(mean, std, strict=True)])


def test_an_unfinished_run_gives_its_best_model_and_says_so(tmp_path):
    with pytest.raises(Stop):
        train(tiny(), tmp_path / "run", [StopAfter(2)])
    model = TrainedModel(Run(tmp_path / "run"))
    best = Run(tmp_path / "run").state("best")
    assert model.note == f"the run is not finished: this is its best model so far, from round {best.round} of 3"
    thresholds = model.run.history[best.round - 1]["calibrated"]["thresholds"]
    assert (model.calibrated, model.thresholds.tolist()) == (True, thresholds)
    torch.testing.assert_close(dict(model.model.state_dict()), best.server.weights)


def test_the_best_model_of_an_older_version_has_no_thresholds(tmp_path):
    with pytest.raises(Stop):
        train(tiny(), tmp_path / "run", [StopAfter(2)])
    model = TrainedModel(age(Run(tmp_path / "run")))
    assert (model.calibrated, model.thresholds.tolist()) == (False, [0.5] * 10)


def test_a_run_without_a_judged_round_has_no_model(tmp_path):
    with pytest.raises(Stop):
        train(tiny(evaluate__every=3), tmp_path / "run", [StopAfter(1)])
    with pytest.raises(FedncaError, match=r"has no model yet; go on with `fednca resume .*run`"):
        TrainedModel(Run(tmp_path / "run"))


def test_a_run_keeps_its_text_table_and_an_older_one_names_the_file_that_is_gone(tmp_path):
    table = tmp_path / "texts.npy"
    np.save(table, np.random.default_rng(0).normal(size=(10, 64)))
    options = {"text": str(table)}
    run = train(tiny(method__name="fedlgt", method__options=options, train__rounds=1), tmp_path / "run")
    before = TrainedModel(run).model.head.texts
    table.unlink()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    moved = Run(tmp_path / "moved")
    assert torch.equal(TrainedModel(moved).model.head.texts, before)
    assert resume(moved.folder).finished
    written = (moved.folder / "config.toml").read_text()
    (moved.folder / "config.toml").write_text(written.replace(str(table), "random"))
    for path in moved.folder.glob("last.*"):
        path.unlink()
    assert not torch.equal(TrainedModel(resume(moved.folder)).model.head.texts, before)  # begun anew
    (moved.folder / "config.toml").write_text(written)
    shutil.move(moved.folder, tmp_path / "run")
    age(Run(tmp_path / "run"))
    (tmp_path / "run/texts.npz").unlink()  # as in runs that are older still
    with pytest.raises(FedncaError, match=r"cannot be built: '.*texts\.npy' cannot be read .*give another text table"):
        TrainedModel(Run(tmp_path / "run"))
    np.savez(tmp_path / "run/texts.npz", table=np.ones((10, 3)))
    with pytest.raises(FedncaError, match=r"the saved constant 'head\.texts' does not fit the model"):
        TrainedModel(Run(tmp_path / "run"))
    np.savez(tmp_path / "run/texts.npz", names=np.array(run.environment["classes"]), table=before.numpy())
    assert torch.equal(TrainedModel(Run(tmp_path / "run")).model.head.texts, before)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (np.zeros((4, 4), np.uint8), r"an image is uint8 of shape \(4, 4\); give uint8 of shape \(H, W, 3\)"),
        (np.zeros((4, 4, 3)), "an image is float64"),
        (Image.new("I;16", (4, 4)), "a picture of mode 'I;16' has no agreed value for white"),
    ],
)
def test_other_images_are_refused(model, image, sentence):
    with pytest.raises(FedncaError, match=sentence):
        model.probabilities([image])


def test_palettes_alpha_and_orientation_are_read_as_in_files(tmp_path):
    rng = np.random.default_rng(0)
    coloured = Image.fromarray(rng.integers(0, 256, (9, 20, 4), np.uint8))
    palette = coloured.convert("RGB").quantize(16)
    palette.info["transparency"] = 3
    for name, picture in (("alpha.png", coloured), ("palette.png", palette)):
        picture.save(tmp_path / name)
        np.testing.assert_array_equal(to_pixels(picture, 16), to_pixels(tmp_path / name, 16))
    turned = coloured.convert("RGB")
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    turned.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        np.testing.assert_array_equal(to_pixels(opened, 16), to_pixels(tmp_path / "turned.png", 16))
    assert (to_pixels(tmp_path / "turned.png", 16) != to_pixels(turned.copy(), 16)).any()
