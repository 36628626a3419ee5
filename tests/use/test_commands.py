import csv
import json
import os
import shutil
import socket
import sys

import pytest
from helpers import Stop, StopAfter, tiny
from PIL import Image

from fednca.cli.app import main
from fednca.runs import train


@pytest.fixture
def told(capsys):
    """Run a command that must fail, and return its one sentence."""

    def tell(*words):
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("fednca: ")
        assert err.count("\n") == 1
        return err

    return tell


@pytest.fixture
def table(image_folder, tmp_path):
    """A folder of four images with labels."""
    shutil.copytree(image_folder, tmp_path / "data/images")
    text = "image,one,two,sex\n0.png,1,0,f\n2.png,0,1,f\n4.png,0,1,m\n6.png,1,0,m\n"
    (tmp_path / "data/labels.csv").write_text(text)
    return tmp_path / "data"


def test_predict_writes_csv_where_nobody_looks(run, image_folder, capsys):
    assert main(["predict", str(run.folder), str(image_folder / "0.png"), str(image_folder / "more")]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["image"].rpartition("/")[2] for row in rows] == [
        "0.png",
        "1.png",
        "11.png",
        "3.png",
        "5.png",
        "7.png",
        "9.png",
    ]
    assert all(0 <= float(row["nine"]) <= 1 for row in rows)


def test_predict_shows_a_table_on_a_terminal(run, image_folder, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["predict", str(run.folder), str(image_folder / "0.png"), "--threshold", "1"]) == 0
    out, err = capsys.readouterr()
    assert "nothing; likeliest: " in out
    assert "Traceback" not in err


def test_predict_tells_bad_images_and_goes_on(run, image_folder, capsys, tmp_path):
    (tmp_path / "bad.png").write_text("garbage")
    out = tmp_path / "new/folder/found.json"
    words = ["predict", str(run.folder), str(tmp_path / "bad.png"), str(image_folder), "--out", str(out)]
    assert main([*words, "--evidence", str(tmp_path / "seen"), "--batch-size", "5"]) == 0
    printed, err = capsys.readouterr()
    assert printed == ""
    assert err.startswith("fednca: image '")
    assert "bad.png' is not an image of a known format" in err
    facts = json.loads(out.read_text())
    assert len(facts["images"]) == 12
    assert [each["image"] for each in facts["unreadable"]] == [str(tmp_path / "bad.png")]
    files = [file for each in facts["images"] for file in each["evidence"].values()]
    assert len(files) == len(set(files)) == len(list((tmp_path / "seen").iterdir()))
    with Image.open(files[0]) as picture:
        assert picture.size == (16, 16)


def test_a_file_name_that_is_no_utf8_is_written(run, image_folder, capsys, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/k\xfcche.png")
    shutil.copy(image_folder / "0.png", odd)
    for name in ("found.json", "found.csv"):
        assert main(["predict", str(run.folder), odd, "--out", str(tmp_path / name)]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["images"][0]["image"] == odd
    assert "k\\udcfcche.png" in (tmp_path / "found.csv").read_text()
    assert main(["predict", str(run.folder), odd, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"][0]["image"] == odd


def test_evaluate_prints_tables_and_writes_json(run, table, capsys, tmp_path):
    words = ["evaluate", str(run.folder), "--data", str(table), "--by", "sex", "--resamples", "20"]
    assert main([*words, "--out", str(tmp_path / "facts.json")]) == 0
    out = capsys.readouterr().out
    assert "95% intervals, images resampled" in out
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "facts.json").read_text())
    assert (printed["images"], printed["resamples"], list(printed["by"])) == (4, 20, ["f", "m"])
    value = printed["metrics"]["micro_auc"]["value"]
    assert f"{100 * value:.1f}" in out


def test_judging_a_model_by_what_it_was_trained_on_is_told(run, table, capsys, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace("[data]", f"[data]\nroot = '{table}'"))
    words = ["evaluate", str(tmp_path / "run"), "--data", f"{table}/../data", "--ignore-extra", "--resamples", "2"]
    assert main(words) == 0
    assert "is what the model was trained on, so expect worse on other images" in capsys.readouterr().err
    shutil.copytree(table, tmp_path / "elsewhere")
    assert main([*words[:3], str(tmp_path / "elsewhere"), *words[4:]]) == 0
    assert capsys.readouterr().err == ""


def test_evaluate_reads_a_table_as_training_did(run, table, capsys, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    options = {"label_column": "found", "separator": ";"}
    config = run.config.replace({"data.name": "folder", "data.options": options})
    (tmp_path / "run/config.toml").write_text(config.to_toml())
    (table / "labels.csv").write_text("image,found\n0.png,one; two\n2.png,two\n")
    words = ["evaluate", str(tmp_path / "run"), "--data", str(table), "--resamples", "2", "--json"]
    assert main(words) == 0
    classes = json.loads(capsys.readouterr().out)["classes"]
    assert (classes["one"]["positives"], classes["two"]["positives"]) == (1, 2)
    assert main([*words, "--separator", "|"]) == 2
    assert "has one; two, and the model has no such class" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), [("onnx", "model.onnx"), ("torchscript", "model.pt")])
def test_export_writes_model_and_card_into_the_run(run, capsys, tmp_path, kind, name):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    assert main(["export", str(folder), "--to", kind]) == 0
    assert "of the model; model card: " in capsys.readouterr().out
    assert {path.name for path in (folder / "export").iterdir()} == {name, f"{name}.md"}


def test_an_unfinished_run_is_used_and_said_to_be_so(image_folder, capsys, tmp_path):
    with pytest.raises(Stop):
        train(tiny(), tmp_path / "run", [StopAfter(1)])
    assert main(["predict", str(tmp_path / "run"), str(image_folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "fednca: the run is not finished: this is its best model so far, from round 1 of 3\n"
    assert json.loads(out)["finished"] is False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("predict RUN", "the following arguments are required: IMAGES"),
        ("predict nowhere x.png", "'nowhere' is not a run folder"),
        ("predict RUN IMAGES --out found.txt", "'found.txt' ends neither in .json nor in .csv; add --json or --csv"),
        ("predict RUN IMAGES --json --csv", "not allowed with argument"),
        ("predict RUN IMAGES --out .", "ends neither in .json nor in .csv"),
        ("predict RUN IMAGES --out . --json", "'.' is a folder; name a file in it"),
        ("predict RUN IMAGES --threshold low", "threshold 'low' is neither 'calibrated' nor a number from 0 to 1"),
        ("predict RUN IMAGES --batch-size 0", "--batch-size: give a whole number (1 or more), not '0'"),
        ("predict RUN IMAGES --device tpu", "device 'tpu' is not known"),
        ("predict RUN IMAGES --thresholds 1", "argument '--thresholds' is not known; did you mean '--threshold'?"),
        ("predict RUN EMPTY", "has no images; their names end in"),
        ("evaluate RUN", "the following arguments are required: --data"),
        ("evaluate RUN --data EMPTY", "labels.csv' is not there"),
        ("evaluate RUN --data EMPTY --confidence 1", "--confidence 1 is not between 0 and 1"),
        ("evaluate RUN --data EMPTY --resamples 0", "--resamples: give a whole number (1 or more), not '0'"),
        ("evaluate RUN --data EMPTY --split all", "invalid choice: 'all'"),
        ("export RUN", "the following arguments are required: --to"),
        ("export RUN --to tflite", "invalid choice: 'tflite'"),
        ("export RUN --to onnx --out .", "'.' is a folder; name a file in it"),
        ("serve RUN --max-mb 0", "--max-mb 0 is not a size above 0"),
        ("serve RUN --port 70000", "--port: give a whole number (1 to 65535), not '70000'"),
    ],
)
def test_a_mistake_is_one_sentence(told, run, image_folder, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"RUN": run.folder, "IMAGES": image_folder, "EMPTY": tmp_path / "empty"}
    assert sentence in told(*(places.get(word, word) for word in words.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_no_readable_image_is_a_failure(run, capsys, tmp_path):
    (tmp_path / "bad.png").write_text("garbage")
    assert main(["predict", str(run.folder), str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "fednca: none of the 1 images could be read"


def test_serving_needs_gradio(told, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "needs the package 'gradio': pip install 'fednca[serve]'" in told("serve", run.folder)


def test_a_port_or_address_that_cannot_be_used_is_told_before_anything_is_loaded(told, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 cannot be used (" in told("serve", run.folder, "--port", port)
    for host in ("nowhere.invalid", "x" * 70, "\udcff"):
        assert "cannot be used (" in told("serve", "nowhere", "--host", host)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_page_for_everybody_is_warned_of(run, capsys, monkeypatch, host, warned):
    served = []
    monkeypatch.setattr("fednca.use.serve.serve", lambda model, *others: served.append((model.run.folder, *others[:3])))
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
    assert main(["serve", str(run.folder), "--host", host, "--port", str(port)]) == 0
    assert served == [(run.folder, host, port, 20)]
    assert ("there is no password" in capsys.readouterr().err) is warned
