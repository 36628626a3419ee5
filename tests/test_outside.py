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


ODD = """
import numpy as np
from torch import nn
from fednca.engines import EagerEngine, Engine
from fednca.methods import Learner, LinearLearner, Method, Rule
from fednca.models import Head
from clinic.peak import PeakHead
from clinic.pull import METHOD
from clinic.stripes import Stripes

class NoOptions:
    SUMMARY = SIZE = LICENCE = OBTAINED = ""
    CLASSES = ("rows", "columns")
    missing = prepare = load = print

class PlainOptions(Stripes):
    class Options:
        train = 60

class NeedsSelf(Stripes):
    def load(self, options, root):
        return Stripes.load(options, root)

class LoadsNothing(Stripes):
    @staticmethod
    def load(options, root):
        pass

class Logits(PeakHead):
    def forward(self, feature_map):
        return super().forward(feature_map).logits

class OneLogit(PeakHead):
    def __init__(self, dim, num_classes):
        super().__init__(dim, 1)

class Greedy(Head):
    def __init__(self, dim):
        super().__init__()

class NoTrain(Engine):
    def __init__(self, place):
        pass
    sums = judge = print

class NoEngine:
    def __init__(self, place):
        pass

built = PeakHead(8, 2)
HEADLESS = Method("headless", METHOD.about, Learner())
def nothing(*given):
    pass
"""
BROKEN = {
    "syntax": "def f(:",
    "name": "x = 1\ny = unheard_of",
    "exits": "import sys\nsys.exit(3)",
    "needy": "import nowhere_to_be_found",
    "classes": "from clinic.pull import *\nMETHOD = Method('m', METHOD.about, LinearLearner, Pull)",
}
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


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--method syntax:METHOD", "'syntax:METHOD' cannot be imported (SyntaxError: "),
        ("--method name:METHOD", "(NameError: name 'unheard_of' is not defined, in line 2 of name.py)"),
        ("--method exits:METHOD", "(SystemExit: 3, in line 2 of exits.py)"),
        ("--method needy:METHOD", "(No module named 'nowhere_to_be_found')"),
        ("--method .odd:METHOD", "'.odd:METHOD' cannot be imported"),
        ("--method classes:METHOD", "the learner of method 'm' is LinearLearner, not an instance of Learner"),
        ("--method odd:nothing", "'odd:nothing' is a function; name a fednca.methods.Method"),
        ("--method odd:HEADLESS", "the learner of method 'headless' has no build_head"),
        ("--dataset odd:NoOptions", "dataset 'odd:NoOptions' has no Options; a fednca.data.Source"),
        ("--dataset odd:nothing", "has no Options, SUMMARY, SIZE, LICENCE, OBTAINED, CLASSES, missing, prepare, load"),
        ("--dataset odd:PlainOptions", "the Options of dataset 'odd:PlainOptions' are no fednca.config.Options"),
        ("--dataset odd:NeedsSelf", "'load' of dataset 'odd:NeedsSelf' must take (options, root)"),
        ("--dataset odd:LoadsNothing --gamma 1", "dataset 'odd:LoadsNothing' loads a NoneType; let `load` return"),
        ("--method fedavg --method.head odd:built", "head 'odd:built' is a PeakHead that is built already"),
        ("--method fedavg --method.head odd:ODD", "cannot be imported"),
        ("--method fedavg --method.head odd:METHOD", "head 'odd:METHOD' is of type Method; name a class or function"),
        ("--method fedavg --method.head odd:Greedy", "head 'odd:Greedy' must take (dim, num_classes)"),
        ("--method fedavg --method.head odd:nothing", "the head of method 'fedavg' is a NoneType; make it a Head"),
        ("--method fedavg --method.head odd:Logits", "returns a Tensor; let it return a fednca.models.Output"),
        ("--method fedavg --method.head odd:OneLogit", "gives logits of shape (2, 1), not (B, 10)"),
        ("--engine odd:METHOD", "engine 'odd:METHOD' is of type Method; name a class or function that takes (place)"),
        ("--engine odd:NoTrain", "engine 'odd:NoTrain' has no train; make it a fednca.engines.Engine"),
        ("--engine odd:NoEngine", "engine 'odd:NoEngine' has no names, note, keeps_states, train, sums, judge"),
        ("--engine odd:nothing", "engine 'odd:nothing' has no names"),
    ],
)
def test_a_part_that_does_not_fit_ends_in_one_sentence(flags, sentence, clinic, capsys):
    for name, code in (BROKEN | {"odd": ODD}).items():
        (clinic / f"{name}.py").write_text(code)
    given = ["--rounds", "1", "--device", "cpu", "--min-samples", "2", "--clients", "2", "--out", "run"]
    small = [] if "--dataset" in flags else ["--data.train-singles", "12", "--data.train-pairs", "2"]
    try:
        assert main(["run", "demo", *given, *small, *flags.split()]) == 2
    finally:
        for name in [*BROKEN, "odd"]:
            sys.modules.pop(name, None)
    told = capsys.readouterr().err
    assert told.startswith("fednca: ")
    assert sentence in told
    assert told.count("\n") == 1
    assert not Path("run").exists()


def test_the_commands_show_a_reference_as_it_is_written(clinic, capsys):
    (clinic / "my.py").write_text("from clinic.pull import METHOD as M")
    rows = ["my:M", "my:M@fednca-ml:strength=1,learner.tau=0.5"]
    given = ["--rounds", "1", "--device", "cpu", "--min-samples", "2", "--clients", "2", "--seeds", "1", "--out", "b"]
    small = ["--data.train-singles", "12", "--data.train-pairs", "2", "--engine", "eager"]
    try:
        assert main(["methods", "my:M"]) == 0
        assert main(["bench", "demo", "--methods", *rows, *given, *small]) == 0
    finally:
        sys.modules.pop("my", None)
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("my:M: FedAvg with a pull") for line in told)
    assert set(rows) <= {line.partition(" ")[0] for line in told}


def test_a_broken_entry_point_ends_in_one_sentence(clinic, installed, capsys):
    (clinic / "clinic" / "pull.py").write_text("1 / 0")
    assert main(["run", "demo", "--method", "pull"]) == 2
    assert "'pull' cannot be imported (ZeroDivisionError: division by zero, in line 1" in capsys.readouterr().err
