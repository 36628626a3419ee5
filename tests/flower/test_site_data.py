"""Sites with their own folders: classes joined by name, and the same training as a natural partition in one place."""

import numpy as np
import pytest
import torch
from folders import join_sites, write_sites
from helpers import tiny
from in_process import InProcessGrid

from fednca.base.errors import FedncaError, RunFailedError
from fednca.flower import roster
from fednca.flower.classes import join_classes, to_joint
from fednca.flower.config import load_server, load_site
from fednca.flower.server import serve
from fednca.runs import Run, train
from fednca.use.card import model_card
from fednca.use.model import TrainedModel

DIGITS = [f"digit {digit}" for digit in range(10)]
KNOWN = {"north": DIGITS[:7], "east": DIGITS[3:], "south": DIGITS[::2]}


def write_server(folder, text=""):
    config = tiny(method__name="fedavg", train__rounds=2)
    (folder / "run.toml").write_text(config.to_toml())
    path = folder / "server.toml"
    head = 'config = "run.toml"\nout = "run"\nsites = ["north", "east", "south"]\nwait = 5.0\n'
    path.write_text(head + text)
    return path


def grid_of(sites):
    return InProcessGrid(*({"site": str(path)} for path in sites.values()))


def test_sites_train_as_the_natural_partition_of_all_their_images_would(tmp_path):
    sites = write_sites(tmp_path / "sites", KNOWN, images=36)
    found = Run(serve(grid_of(sites), load_server(write_server(tmp_path))))

    config = tiny(method__name="fedavg", train__rounds=2, partition__kind="natural").replace(
        {"data.name": "folder", "data.root": str(join_sites(sites, DIGITS, tmp_path / "all"))}
    )
    expected = train(config, tmp_path / "engine")

    assert found.environment["classes"] == expected.environment["classes"] == DIGITS
    mine, reference = (run.state("last").server.weights for run in (found, expected))
    torch.testing.assert_close(mine, reference, rtol=0, atol=1e-6)
    for mine, reference in zip(found.history, expected.history, strict=True):
        assert mine["clients"] == reference["clients"]
        assert mine["test"]["class_f1"] == reference["test"]["class_f1"]

    card = model_card(TrainedModel(found), "model.onnx", "onnx")
    assert "3 clients, one for each site in the data." in card
    assert "beta" not in card


def test_sites_may_have_numbers_for_names(tmp_path):
    sites = write_sites(tmp_path / "sites", {"0": DIGITS, "1": DIGITS, "2": DIGITS}, images=24)
    grid = grid_of(sites)
    grid.nodes[998].fault = lambda message, reply: None if message.metadata.message_type == "train" else reply
    settings = load_server(write_server(tmp_path)).model_copy(update={"sites": list(sites), "deadline": 1.0})
    (first, _) = Run(serve(grid, settings)).history
    assert (first["took_part"], first["left_out"]) == (["0", "1"], {"2": "it did not answer within 1 s"})


def test_a_class_that_a_site_lacks_is_unknown_there_not_absent():
    labels = np.array([[1, 0], [0, -1]], np.int8)
    joint = to_joint(labels, ["cat", "dog"], ["ant", "dog", "cat"])
    assert joint.tolist() == [[-1, 0, 1], [-1, -1, 0]]


@pytest.mark.parametrize(
    ("sites", "wanted", "joint"),
    [
        ({"a": ["x", "b"], "b": ["x", "b"]}, None, ("x", "b")),
        ({"a": ["x", "b"], "b": ["b", "x"]}, None, ("b", "x")),
        ({"a": ["x"], "b": ["b"]}, ["x", "q", "b"], ("x", "q", "b")),
        ({"a": ["grade 1", "grade 1+"], "b": ["grade 1"], "c": ["grade 1+"]}, None, ("grade 1", "grade 1+")),
    ],
)
def test_classes_are_joined_in_a_fixed_order(sites, wanted, joint):
    assert join_classes(sites, wanted) == joint


@pytest.mark.parametrize(
    ("sites", "wanted", "sentence"),
    [
        ({"a": ["Mass"], "b": ["mass"]}, None, "site 'a' writes class 'Mass', and site 'b' writes 'mass'; agree"),
        ({"a": ["pleural effusion"], "b": ["Pleural_Effusion"]}, None, "agree on one name"),
        ({"a": ["mass", "mass"]}, ["mass"], "site 'a' must name each of its classes once"),
        ({"a": ["masses"]}, ["mass"], "site 'a' has class 'masses', which the federation does not"),
        ({"a": ["MASS"]}, ["mass"], "did it mean 'mass'"),
    ],
)
def test_unknown_and_conflicting_classes_are_refused_with_a_sentence(sites, wanted, sentence):
    with pytest.raises(FedncaError, match=sentence):
        join_classes(sites, wanted)


def test_a_site_with_a_class_that_nobody_wants_is_refused_and_the_others_train(tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "PAUSE", 0.05)
    sites = write_sites(tmp_path / "sites", KNOWN, images=24)
    text = sites["south"].parent.joinpath("labels.csv").read_text()
    sites["south"].parent.joinpath("labels.csv").write_text(text.replace("digit 8", "digit eight"))
    settings = load_server(write_server(tmp_path, f"classes = {DIGITS}\n")).model_copy(update={"wait": 1.0})
    run = Run(serve(grid_of(sites), settings))
    assert "class 'digit eight', which the federation does not" in run.history[0]["left_out"]["south"]
    assert run.history[0]["took_part"] == ["east", "north"]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda sites, grid: setattr(grid.nodes[1000], "registered", "west"), "node registered as 'west' says that it"),
        (lambda sites, grid: rename(sites["north"], "norht"), "north: it is not connected"),
        (lambda sites, grid: rename(sites["north"], "south"), "north: it is not connected"),
        (lambda sites, grid: sites["north"].unlink(), "north: it is not connected"),
        (lambda sites, grid: lose_registered(sites["north"], grid.nodes[1000]), r"north: it could not do its part"),
    ],
)
def test_a_node_that_is_not_the_site_it_should_be_is_refused(spoil, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "PAUSE", 0.05)
    sites = write_sites(tmp_path / "sites", KNOWN, images=24)
    grid = grid_of(sites)
    spoil(sites, grid)
    settings = load_server(write_server(tmp_path, "min_sites = 3\n")).model_copy(update={"wait": 0.5})
    with pytest.raises(RunFailedError, match=sentence):
        serve(grid, settings)


def lose_registered(path, node):
    path.unlink()
    node.registered = "north"


def rename(path, name):
    path.write_text(path.read_text().replace('name = "north"', f'name = "{name}"'))


def test_a_site_mended_without_a_restart_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "PAUSE", 0.05)
    monkeypatch.setattr(roster, "RETRY", 0.2)
    sites = write_sites(tmp_path / "sites", KNOWN, images=24)
    grid = grid_of(sites)
    good = sites["north"].read_text()
    sites["north"].write_text("name = 3")

    def mend(message, reply):
        sites["north"].write_text(good)
        return reply

    grid.nodes[1000].fault = mend
    run = Run(serve(grid, load_server(write_server(tmp_path))))
    assert run.history[0]["took_part"] == ["east", "north", "south"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("min_sites = 4", "min_sites is 4 for 3 sites"),
        ("deadlin = 3.0", "did you mean 'deadline'"),
        ('classes = ["a", "a"]', "a name occurs twice in classes"),
        ("privacy.mode = 'both'", "setting 'privacy.mode'"),
        ("overrides.train.round = 3", "train.round"),
    ],
)
def test_a_mistake_in_server_toml_is_told_in_a_sentence(text, sentence, tmp_path):
    with pytest.raises(FedncaError, match=sentence):
        load_server(write_server(tmp_path, text)).run_config()


def test_paths_are_meant_from_the_file_that_names_them(tmp_path):
    (tmp_path / "site.toml").write_text('name = "north"\nroot = "data"\n')
    site = load_site(tmp_path / "site.toml")
    assert (site.root, site.state, site.cache) == (str(tmp_path / "data"), str(tmp_path / "state"), None)
    assert load_server(write_server(tmp_path)).out == str(tmp_path / "run")


@pytest.mark.parametrize("name", ["", "../north", "a" * 65, "no\nrth"])
def test_a_name_that_is_no_name_is_refused(name, tmp_path):
    (tmp_path / "site.toml").write_text(f"name = {name!r}\n" if "\n" not in name else 'name = "no\\nrth"\n')
    with pytest.raises(FedncaError, match="setting 'name'"):
        load_site(tmp_path / "site.toml")
