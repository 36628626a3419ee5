import json
import re

import pytest
from helpers import TINY, tiny

from fednca.cli.app import main
from fednca.report import page


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(tiny(train__rounds=1).to_toml())
    return str(path)


def test_report_and_figures_go_beside_the_runs_or_where_they_are_told(runs_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = str(runs_folder / "fedavg-0"), str(runs_folder / "fedavg-1")
    assert main(["report", one, "--no-pictures"]) == 0
    assert (runs_folder / "fedavg-0" / "report.html").is_file()
    assert main(["report", one, two, "--no-pictures"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert main(["report", str(runs_folder), "-o", "there/page.html", "--watch"]) == 0
    assert "report: there/page.html" in capsys.readouterr().out
    assert "data:image/png" in (tmp_path / "there/page.html").read_text(encoding="utf-8")
    assert main(["figures", one, "--out", "pictures", "--images", "20"]) == 0
    assert "18 files: pictures" in capsys.readouterr().out
    assert len(list((tmp_path / "pictures").iterdir())) == 18


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("report", "the following arguments are required: RUN"),
        ("report no/such/run", "'no/such/run' is not a run folder"),
        ("figures no/such/run", "'no/such/run' is not a run folder"),
        ("figures . --images 0", "argument --images: give a whole number (1 or more), not '0'"),
        ("run demo --log tensorbord", "argument --log: invalid choice: 'tensorbord'"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_can_be_logged(config, tmp_path):
    assert main(["run", config, "--out", str(tmp_path / "run"), "--log", "tensorboard"]) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_the_demo_ends_with_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "POINTS", 50)
    flags = [f"--{path.replace('_', '-')}={value}" for path, value in TINY.items() if not isinstance(value, dict)]
    flags += [f"--data.{name.replace('_', '-')}={value}" for name, value in TINY["data.options"].items()]
    assert main(["demo", "--out", str(tmp_path / "demo"), *flags, "--rounds", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'demo' / 'report.html'}"
    text = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [group["label"] for group in data["groups"]] == ["fedavg", "fednca-ml"]
    assert all(group["collapse"]["nc1"]["x"] == [1] for group in data["groups"])
