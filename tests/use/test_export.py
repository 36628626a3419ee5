import json
import shutil
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import tiny
from older_runs import age
from safetensors import safe_open

import fednca.use.card
import fednca.use.export
from fednca.base.errors import FedncaError, RunFailedError
from fednca.data.examples import choose_rows
from fednca.runs import Run, train
from fednca.use.card import model_card
from fednca.use.data import examples
from fednca.use.export import export
from fednca.use.model import TrainedModel

METHODS = ["fedavg", "fednca-ml", "fedlgt", "ml-decoder", "spherefed"]


def by_hand(facts, images):
    """Normalise images (N, H, W, 3) as the metadata of a file says."""
    mean, std = (np.array(json.loads(facts[name]), np.float32) for name in ("mean", "std"))
    return ((images.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2).copy()


@pytest.mark.parametrize("method", METHODS)
def test_onnx_gives_the_probabilities_to_batches_of_any_size(run_of, test_images, tmp_path, method):
    model = TrainedModel(run_of(method))
    difference, card = export(model, "onnx", tmp_path / "new/model.onnx")
    assert difference < 1e-5
    assert card.name == "model.onnx.md"
    session = onnxruntime.InferenceSession(tmp_path / "new/model.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    for images in (test_images[:1], test_images[:7], test_images):
        (found,) = session.run(["probabilities"], {"images": by_hand(facts, images)})
        expected = model.probabilities(list(images)).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_torchscript_gives_the_probabilities_to_batches_of_any_size(run_of, test_images, tmp_path, method):
    model = TrainedModel(run_of(method))
    export(model, "torchscript", tmp_path / "model.pt")
    extra = {"metadata.json": ""}
    with fednca.use.export.quiet(), torch.no_grad():
        loaded = torch.jit.load(tmp_path / "model.pt", _extra_files=extra)
        assert "prim::Loop" not in str(loaded.inlined_graph)  # all images at once
        for images in (test_images[:1], test_images[:7], test_images):
            found = loaded(torch.from_numpy(by_hand(json.loads(extra["metadata.json"]), images)))
            expected = model.probabilities(list(images))
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_safetensors_holds_all_tensors_of_the_model(run_of, tmp_path, method):
    model = TrainedModel(run_of(method))
    export(model, "safetensors", tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = file.metadata()
    expected = {**dict(model.model.named_parameters()), **dict(model.model.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    (tmp_path / "config.toml").write_text(facts["config"])
    assert Run(tmp_path).config == model.run.config


def test_metadata_says_what_a_user_must_know(model, tmp_path):
    export(model, "onnx", tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    facts = {prop.key: prop.value for prop in proto.metadata_props}
    assert json.loads(facts["classes"]) == list(model.classes)
    assert json.loads(facts["thresholds"]) == model.run.results["val"]["calibrated"]["thresholds"]
    assert (facts["image_size"], facts["method"], facts["dataset"]) == ("16", "fednca-ml", "digits")
    assert "not logits" in facts["output"]
    assert "float32 (batch, 3, 16, 16), RGB, normalised" in facts["input"]
    here = str(fednca.use.export.__file__).removesuffix("use/export.py").encode()
    assert here not in (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "safetensors"])
def test_a_file_that_disagrees_is_not_written(model, tmp_path, monkeypatch, kind):
    build = getattr(fednca.use.export, f"build_{kind}")

    def disturbed(graph, *others):
        with torch.no_grad():
            content, read = build(graph, *others)
            graph.model.backbone.net.conv1[0].weight.mul_(-1)  # after the file was made of it
        return content, read

    monkeypatch.setattr(fednca.use.export, f"build_{kind}", disturbed)
    with pytest.raises(RunFailedError, match=rf"the {kind} file's probabilities differ .* was not written"):
        export(model, kind, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_used_is_not_written(model, tmp_path, monkeypatch):
    def useless(*_):
        def read(batch):
            raise RuntimeError("Traceback of TorchScript\nsizes do not match")

        return b"", read

    monkeypatch.setattr(fednca.use.export, "build_torchscript", useless)
    with pytest.raises(RunFailedError, match=r"cannot score images \(sizes do not match\), so it was not written"):
        export(model, "torchscript", tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_without_its_card(model, tmp_path, monkeypatch):
    def fail(*_):
        raise FedncaError("no card")

    monkeypatch.setattr(fednca.use.export, "model_card", fail)
    with pytest.raises(FedncaError, match="no card"):
        export(model, "safetensors", tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_exporting_leaves_the_model_alone(run, test_images, tmp_path):
    model = TrainedModel(run)
    before = model.probabilities(list(test_images))
    export(model, "torchscript", tmp_path / "model.pt")
    assert torch.equal(model.probabilities(list(test_images)), before)


def test_a_float64_model_is_exported_in_float32(tmp_path, test_images):
    model = TrainedModel(train(tiny(train__rounds=1, train__precision="float64"), tmp_path / "run"))
    export(model, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    images = by_hand(session.get_modelmeta().custom_metadata_map, test_images)
    np.testing.assert_allclose(
        session.run(None, {"images": images})[0], model.probabilities(list(test_images)).numpy(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(model, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FedncaError, match=rf"needs the package '{package}': pip install 'fednca\[export\]'"):
        export(model, "onnx", tmp_path / "model.onnx")


def table_of(card, first):
    """Read a Markdown table whose first header is `first`: its rows by their first cell."""
    lines = card.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def percent(share):
    return f"{100 * share:.1f}"


def test_the_card_tells_data_method_federation_and_metrics_of_each_class(model):
    card = model_card(model, "model.onnx", "onnx")
    run, federation = model.run, model.run.federation
    plain, calibrated = run.results["val"]["test"], run.results["val"]["calibrated"]["test"]
    assert table_of(card, "metric")["macro-F1"] == [percent(plain["macro_f1"]), percent(calibrated["macro_f1"])]
    rows = table_of(card, "class")
    for c, name in enumerate(model.classes):
        counts = [(split.labels[:, c] == 1).sum() for split in (federation.dataset.train, federation.dataset.test)]
        numbers = [percent(plain[f"class_{kind}"][c]) for kind in ("auc", "ap", "f1")]
        threshold = f"{run.results['val']['calibrated']['thresholds'][c]:.3f}"
        assert rows[name] == [*map(str, counts), *numbers, threshold, percent(calibrated["class_f1"][c])]
    sizes = [len(own) for own in federation.train.partition.clients]
    for fact in (
        "# fednca-ml on digits",
        "3 clients; beta = 1 (how evenly",
        f"Training images of a client: {min(sizes)} to {max(sizes)}",
        "Distance between the label distributions of two clients, on average (0: equal, 1: nothing in common): 0.",
        f"Images: {len(federation.train.rows)} train, {len(federation.val.rows)} validation, 75 test.",
        "lambda1 = 1.0",
        "Fewer than 20 test images show zero, one,",
        "licence: CC BY 4.0",
    ):
        assert fact in card


def test_the_card_tells_the_options_of_every_part(tmp_path):
    taken = {"method__learner": "spherefed", "method__closing": "spherefed", "method__options": {"mu": 0.25}}
    run = train(tiny(method__name="fedprox", train__rounds=1, **taken), tmp_path / "run")
    card = model_card(TrainedModel(run), "model.pt", "torchscript")
    for fact in ("fedprox (", "Learner (head and local loss): spherefed (", "Closing: spherefed.", "mu = 0.25"):
        assert fact in card
    assert "target = scaled, classifier_seed = 0, mu = 0.25, ridge = 0.001" in card


def test_a_card_without_data_and_of_an_unfinished_run(model, tmp_path, monkeypatch):
    shutil.copytree(model.run.folder, tmp_path / "run")
    for name in ("final.safetensors", "results.json"):
        (tmp_path / "run" / name).unlink()

    def gone(run):
        raise FedncaError("no data")

    monkeypatch.setattr(fednca.use.card, "dataset_of", gone)
    card = model_card(TrainedModel(Run(tmp_path / "run")), "model.pt", "torchscript")
    assert "**The run is not finished: this is its best model so far" in card
    assert "The dataset was not there when this card was written" in card
    assert table_of(card, "class")["zero"][:2] == ["–", "–"]
    reached = Run(tmp_path / "run").results["val"]["calibrated"]["test"]["macro_f1"]
    assert table_of(card, "metric")["macro-F1"][1] == f"{100 * reached:.1f}"
    card = model_card(TrainedModel(age(Run(tmp_path / "run"))), "model.pt", "torchscript")
    assert "It has no calibrated thresholds" in card
    assert table_of(card, "metric")["macro-F1"][1] == "–"


def test_examples_are_test_images_that_show_every_class(run, test_images):
    found = examples(run)
    labels = run.federation.dataset.test.labels
    assert len(found) == 8
    assert {name for each in found for name in each.labels} == set(run.federation.dataset.classes)
    for each in found:
        (row,) = np.flatnonzero((test_images == each.picture).all(axis=(1, 2, 3)))[:1]
        assert each.labels == tuple(np.array(run.federation.dataset.classes)[labels[row] == 1])


def test_rows_are_chosen_for_the_classes_shown_least():
    shows = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]], bool)
    assert choose_rows(shows, 2) == [2, 4]
    assert sorted(choose_rows(shows, 9)) == [0, 1, 2, 3, 4]
    assert choose_rows(np.zeros((0, 3), bool), 4) == []
    alike = np.tile(np.array([1, 1, 0, 0, 0, 0], bool), (40, 1))
    alike[11], alike[29], alike[30] = ([0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0])
    assert choose_rows(alike, 3) == [0, 11, 29]
