import csv

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from fednca.base.errors import FedncaError
from fednca.data.sources.folder import Options
from fednca.use.bootstrap import Resampling
from fednca.use.evaluate import Reading, evaluate, read_labelled

HOW = Resampling(resamples=20)


@pytest.fixture(scope="module")
def data(run, test_images, tmp_path_factory):
    """The run's test images as anybody's folder: columns in another order, one class missing, patients, sexes."""
    root = tmp_path_factory.mktemp("data")
    (root / "images").mkdir()
    dataset = run.federation.dataset
    order = [c for c in reversed(range(10)) if dataset.classes[c] != "seven"]
    with (root / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "sex", *(dataset.classes[c] for c in order), "patient", "split"])
        for number, (image, labels) in enumerate(zip(test_images, dataset.test.labels, strict=True)):
            Image.fromarray(image).save(root / f"images/{number}.png")
            part = "test" if number < 60 else "train"
            writer.writerow([f"{number}.png", "fm"[number % 2], *labels[order], number // 2, part])
    return root


def read(data, model, **how):
    return read_labelled(data, model.classes, Reading(**{"by": "sex"} | how))


def test_metrics_are_scikit_learns(data, model, run, test_images):
    facts, failed = evaluate(model, read(data, model), "calibrated", HOW)
    assert failed == []
    assert (facts["images"], facts["groups"]) == (75, 38)
    p, y = model.probabilities(list(test_images)).numpy(), run.federation.dataset.test.labels
    aucs, f1s = [], []
    for c, name in enumerate(model.classes):
        found = facts["classes"][name]
        if name == "seven":  # the table does not tell
            assert (found["known"], found["auc"]["value"], found["f1"]["low"]) == (0, None, None)
            continue
        aucs.append(metrics.roc_auc_score(y[:, c], p[:, c]))
        f1s.append(metrics.f1_score(y[:, c], p[:, c] > model.thresholds[c].item()))
        assert (found["positives"], found["known"]) == (y[:, c].sum(), 75)
        assert found["auc"]["value"] == pytest.approx(aucs[-1])
        assert found["f1"]["value"] == pytest.approx(f1s[-1])
        assert found["auc"]["low"] <= found["auc"]["value"] <= found["auc"]["high"]
    assert facts["metrics"]["macro_auc"]["value"] == pytest.approx(np.mean(aucs))
    assert facts["metrics"]["macro_f1"]["value"] == pytest.approx(np.mean(f1s))


def test_a_value_of_a_column_is_judged_as_its_images_alone(data, model):
    everything = read(data, model)
    facts, _ = evaluate(model, everything, "0.5", HOW)
    assert list(facts["by"]) == ["f", "m"]
    rows = [row for row in range(75) if row % 2]
    text = (data / "labels.csv").read_text().splitlines()
    (data / "men.csv").write_text("\n".join([text[0], *(text[row + 1] for row in rows)]))
    alone, _ = evaluate(model, read(data, model, table="men.csv", by=None, ignore_extra=True), "0.5", HOW)
    assert facts["by"]["m"] == alone


def test_a_split_is_read_alone(data, model):
    assert len(read(data, model, split="test").paths) == 60
    assert len(read(data, model).paths) == 75
    with pytest.raises(FedncaError, match="has no rows of split 'val'; choose another --split"):
        read(data, model, split="val")


def test_classes_in_one_column(data, model):
    (data / "named.csv").write_text("image,found\n0.png,one|two\n1.png,\n2.png,seven\n")
    found = read(data, model, table="named.csv", label_column="found", by=None)
    by_name = dict(zip(model.classes, found.labels.T.tolist(), strict=True))
    assert (by_name["one"], by_name["seven"], by_name["three"]) == ([1, 0, 0], [0, 0, 1], [-1, -1, -1])
    assert found.groups is None


def test_a_table_like_that_of_training_is_read_as_it_was(data, model, tmp_path):
    (tmp_path / "scans").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "scans/0.png").touch()
    trained = Options(
        image_column="scan", label_column="found", separator=";", split_column="fold", group_column="case",
        site_column="clinic", image_folder="scans",
    )  # fmt: skip
    (tmp_path / "labels.csv").write_text("id,scan,found,fold,case,clinic\n9,0.png,one; two,test,c,n\n")
    found = read_labelled(tmp_path, model.classes, Reading(split="test"), trained)
    assert found.paths == (tmp_path / "scans/0.png",)
    assert {model.classes[c] for c in np.flatnonzero(found.labels[0] == 1)} == {"one", "two"}
    assert found.groups is not None
    unlike, usual = (read_labelled(data, model.classes, Reading(by="sex"), how) for how in (trained, None))
    assert np.array_equal(unlike.labels, usual.labels)
    assert unlike.paths == usual.paths


@pytest.mark.parametrize(
    ("text", "how", "sentence"),
    [
        ("image,one,ten,age\n0.png,1,0,9\n", {}, "has age, ten, and the model has no such class; rename"),
        ("image,found\n0.png,one|ten\n", {"label_column": "found"}, "has ten, and the model has no such class"),
        ("image,one\n0.png,1\n", {"by": "sex"}, "--by 'sex' is not in table"),
        ("image,one\n0.png,1\n", {"label_column": "found"}, "label_column 'found' is not in table"),
        ("image,one\n0.png,1\n", {"split": "test"}, "has no column 'split' to find 'test' in; leave --split out"),
        ("image,one\n0.png,2\n", {}, "row 2 has '2' in column 'one'"),
        ("image,ten\n0.png,2\n", {"ignore_extra": True}, "has no class column among"),
        ("image,one\nx.png,1\n", {}, r"x\.png', which is not there"),
        ("image,one,patient\n0.png,1,\n", {}, "row 2 has no patient"),
    ],
)
def test_a_table_that_does_not_fit_is_one_sentence(data, model, text, how, sentence):
    (data / "bad.csv").write_text(text)
    with pytest.raises(FedncaError, match=sentence):
        read(data, model, **{"table": "bad.csv", "by": None} | how)


def test_classes_that_training_left_out_are_named_as_such(data, model):
    (data / "more.csv").write_text("image,one,ten\n0.png,1,0\n")
    trained = Options(classes=list(model.classes))
    with pytest.raises(
        FedncaError, match=r"has ten, .* used only the classes in --data\.classes; ignore the others with"
    ):
        read_labelled(data, model.classes, Reading(table="more.csv"), trained)


def test_classes_the_model_does_not_know_can_be_left_out(data, model):
    (data / "extra.csv").write_text("image,one,ten,age\n0.png,1,x,9\n1.png,0,,8\n")
    found = read(data, model, table="extra.csv", by=None, ignore_extra=True)
    assert found.labels[:, model.classes.index("one")].tolist() == [1, 0]
    assert (np.delete(found.labels, model.classes.index("one"), axis=1) == -1).all()


def test_a_column_with_too_many_values_is_refused(data, model):
    lines = ["image,one,age", *(f"{number}.png,1,{number}" for number in range(60))]
    (data / "ages.csv").write_text("\n".join(lines))
    with pytest.raises(FedncaError, match="--by: column 'age' has 60 values; choose one with at most 50"):
        read(data, model, table="ages.csv", by="age")


def test_a_wrong_threshold_is_told_before_images_are_scored(data, model):
    heard = []
    with pytest.raises(FedncaError, match="threshold 'half' is neither"):
        evaluate(model, read(data, model), "half", HOW, advance=heard.append)
    assert heard == []


def test_images_that_cannot_be_read_are_left_out_and_told(data, model):
    (data / "images/bad.png").write_text("garbage")
    (data / "broken.csv").write_text("image,one,sex\n0.png,1,f\nbad.png,1,m\n1.png,0,m\n")
    heard = []
    facts, failed = evaluate(model, read(data, model, table="broken.csv"), "0.5", HOW, 2, heard.append)
    assert (facts["images"], [error.path.name for error in failed], sum(heard)) == (2, ["bad.png"], 3)
    (data / "worse.csv").write_text("image,one\nbad.png,1\n")
    with pytest.raises(FedncaError, match=r"none of the 1 images could be read; the first problem: image .*bad"):
        evaluate(model, read(data, model, table="worse.csv", by=None), "0.5", HOW)
