"""The four files of CONTRIBUTING.md, as a package outside of fednca: by reference, and by entry point."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY, tiny

from fednca.base.plugins import plugin_names
from fednca.cli.app import main
from fednca.config import load_config
from fednca.runs import train

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
ENTRY_POINTS = """
[fednca.methods]
pull = clinic.pull:METHOD
[fednca.datasets]
stripes = clinic.stripes:Stripes
[fednca.heads]
peak = clinic.peak:PeakHead
[fednca.engines]
backwards = clinic.backwards:Backwards
"""


@pytest.fixture
def clinic(tmp_path, monkeypatch):
    """A folder with the package, which is the current one."""
    files = re.findall(r"### `clinic/(\w+\.py)`.*?```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    assert [name for name, _ in files] == ["pull.py", "stripes.py", "peak.py", "backwards.py"]
    (tmp_path / "clinic").mkdir()
    for name, code in [*files, ("__init__.py", "")]:
        (tmp_path / "clinic" / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugin_names.cache_clear()
    yield tmp_path
    plugin_names.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "clinic"]:
        del sys.modules[name]


@pytest.fixture
def installed(clinic, monkeypatch):
    """The package as if it were installed, with its entry points."""
    facts = clinic / "clinic-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: clinic\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(clinic))
    plugin_names.cache_clear()


NAMES = {
    "reference": ("clinic.pull:METHOD", "clinic.stripes:Stripes", "clinic.peak:PeakHead", "clinic.backwards:Backwards"),
    "entry point": ("pull", "stripes", "peak", "backwards"),
}


@pytest.fixture(params=list(NAMES))
def names(request, clinic):
    """What the four parts are called."""
    if request.param == "entry point":
        request.getfixturevalue("installed")
    return NAMES[request.param]


def last_weights(run):
    return run.state("last").server.weights


def test_a_method_runs_and_its_option_counts(names, tmp_path):
    weak, strong = (
        train(tiny(method__name=names[0], method__options={"strength": s}), tmp_path / str(s)) for s in (0.0, 1.0)
    )
    plain = train(tiny(method__name="fedavg"), tmp_path / "fedavg")
    torch.testing.assert_close(last_weights(weak), last_weights(plain), rtol=0, atol=0)
    assert strong.history[-1]["losses"]["pull"] > 0
    start = train(tiny(method__name="fedavg", train__lr=1e-12), tmp_path / "start")

    def moved(run):
        pairs = ((last_weights(run)[name], last_weights(start)[name]) for name in last_weights(run))
        return sum(float((a - b).square().sum()) for a, b in pairs if a.is_floating_point())

    assert moved(strong) < moved(plain)
    assert strong.config.method.options == {"head": "linear", "strength": 1.0}


def test_its_rule_trains_another_learner(names, tmp_path):
    run = train(tiny(method__name=names[0], method__learner="fednca-ml", train__rounds=1), tmp_path / "run")
    assert set(run.history[0]["losses"]) == {"bce", "neg", "pos", "pull"}
    assert run.config.method.options == {"strength": 0.05}


def test_a_dataset_runs_with_its_options(names, tmp_path):
    own = {name: value for name, value in TINY.items() if name != "data.options"}
    config = load_config("demo", own | {"data.name": names[1], "data.options": {"train": 80}, "partition.gamma": 1.0})
    run = train(config, tmp_path / "run")
    assert run.environment["classes"] == ["rows", "columns"]
    assert sum(len(rows) for rows in run.federation.train.partition.clients) == 80


def test_a_head_runs_and_has_collapse_measures(names, tmp_path):
    changes = {"method__options": {"head": names[2]}, "evaluate__collapse": True, "train__rounds": 1}
    run = train(tiny(method__name="fedavg", **changes), tmp_path / "run")
    assert run.history[0]["collapse"]["nc3"] is not None
    images = torch.randn(2, 3, 16, 16)
    model = run.model()
    expected = model.backbone(images).amax(dim=(2, 3)) @ last_weights(run)["head.linear.weight"].T
    torch.testing.assert_close(model(images).logits, expected + last_weights(run)["head.linear.bias"])


def test_an_engine_gives_the_weights_of_the_eager_one(names, tmp_path):
    found, expected = (train(tiny(engine=engine), tmp_path / engine[:5]) for engine in (names[3], "eager"))
    torch.testing.assert_close(last_weights(found), last_weights(expected), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--method clinic.pull:NOTHING", "'clinic.pull:NOTHING' cannot be imported"),
        ("--method nowhere.at_all:METHOD", "'nowhere.at_all:METHOD' cannot be imported"),
        ("--method clinic.pull:Pull", "name a fednca.methods.Method"),
        ("--method fedavg --method.head peaks", "head 'peaks' is not known"),
        ("--engine backward", "engine 'backward' is not known"),
    ],
)
def test_a_wrong_name_ends_in_one_sentence(flags, sentence, clinic, capsys):
    given = ["--rounds", "1", "--device", "cpu", "--data.train-singles", "12", "--data.train-pairs", "2"]
    assert main(["run", "demo", "--min-samples", "2", *given, *flags.split()]) == 2
    assert sentence in capsys.readouterr().err
