import json

import pytest

from fednca.base.errors import FedncaError
from fednca.config import Config, build_config, leaves, load_config, preset_names
from fednca.config.fields import parse_value
from fednca.data.sources import folder

PAPER = {  # dataset, beta, gamma and whether training starts from scratch, as the paper's tables name them
    "cifar10-0.5": ("cifar10", 0.5, 0.5, True),
    "cifar10-0.1": ("cifar10", 0.1, 0.5, True),
    "dermamnist-0.5": ("dermamnist", 0.5, 0.71, False),
    "dermamnist-0.1": ("dermamnist", 0.1, 0.71, False),
    "voc-0.05": ("voc", 0.05, 0.5, False),
    "voc-0.01": ("voc", 0.01, 0.5, False),
    "coco-0.05": ("coco", 0.05, 0.75, False),
    "chestxray14-0.5": ("chestxray14", 0.5, 0.5, False),
    "chestxray14-0.1": ("chestxray14", 0.1, 0.5, False),
}


def test_presets_are_the_demo_and_the_papers_nine_settings():
    assert set(preset_names()) == {"demo", *PAPER}


@pytest.mark.parametrize("name", PAPER)
def test_paper_preset(name):
    config = load_config(name)
    part, train = config.partition, config.train
    scratch = config.model.pretrained == "none"
    assert (config.data.name, part.beta, part.gamma, scratch) == PAPER[name]
    assert (part.clients, train.rounds, train.local_epochs, train.batch_size) == (10, 100, 1, 32)
    assert (train.optimizer, train.lr, train.weight_decay, train.participation) == ("adamw", 1e-4, 0.01, 1.0)
    backbone = "resnet18" if scratch else "resnet18.tv_in1k"
    size = 64 if config.data.name == "cifar10" else 224  # docs/results.md tells why
    assert (config.model.backbone, config.data.image_size) == (backbone, size)
    assert config.evaluate.select == ("macro_auc" if config.data.name == "chestxray14" else "macro_f1")


def test_toml_round_trip(tmp_path):
    config = load_config(
        "demo", {"train.betas": [0.8, 0.9], "method.options": {"lambda1": 0.5}, "train.clip_norm": 1.5}
    )
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert load_config(path) == config


def test_every_field_is_documented():
    assert [path for path, field in leaves() if not field.description] == []


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.rounds", "7", 7),
        ("train.lr", "1e-3", 1e-3),
        ("train.betas", "0.9,0.98", (0.9, 0.98)),
        ("train.betas", "none", None),
        ("model.norm", "group", "group"),
        ("data.root", "/some/where", "/some/where"),
    ],
)
def test_flag_text_becomes_the_fields_type(path, text, value):
    assert parse_value(path, dict(leaves())[path], text) == value


def test_spaces_after_commas_do_not_count():
    assert parse_value("classes", folder.Options.model_fields["classes"], "cat, dog") == ["cat", "dog"]
    listed = '["cat", "dog, sitting"]'
    assert parse_value("classes", folder.Options.model_fields["classes"], listed) == ["cat", "dog, sitting"]
    with pytest.raises(FedncaError, match=r"list \[cat, dog\] is not valid JSON; put it in single quotes"):
        parse_value("classes", folder.Options.model_fields["classes"], "[cat, dog]")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"train": {"rounds": "5"}}, "setting 'train.rounds' should be a valid integer, not '5'"),
        ({"train": {"betas": [0.1, 0.2, 0.3]}}, "setting 'train.betas' should have at most 2 items"),
        ({"train": {"rounds": 0}}, "'train.rounds' should be greater than or equal to 1, not 0"),
        ({"train": {"rounds": 1.5}}, "'train.rounds'"),
        ({"train": {"lr": float("nan")}}, "'train.lr'"),
        ({"train": {"betas": [0.9]}}, "'train.betas"),
        ({"partition": {"beta": 0}}, "'partition.beta' should be greater than 0"),
        ({"partition": {"gamma": 1.01}}, "'partition.gamma' should be less than or equal to 1"),
        ({"model": {"norm": "layer"}}, "'model.norm' should be 'batch', 'group' or 'frozen', not 'layer'"),
        ({"train": {"round": 5}}, "setting 'train.round' is not known; did you mean 'train.rounds'?"),
        ({"trian": {}}, "setting 'trian' is not known; did you mean 'train'?"),
        ({"train": 5}, "'train'"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_it(values, told):
    with pytest.raises(FedncaError) as error:
        build_config(values)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["trian.rounds", "seed.rounds", "train.augment.hflip.x", "train.rounds.x"])
def test_a_wrong_path_is_one_sentence_that_names_it(path):
    with pytest.raises(FedncaError, match=f"^setting '{path}' is not known"):
        Config().replace({path: 5})


def test_another_method_drops_the_old_ones_options(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[method]\nname = "fednca-ml"\noptions = { lambda1 = 0.5 }\n')
    assert load_config(path).method.options == {"lambda1": 0.5}
    assert load_config(path, {"method.name": "fednca-ml"}).method.options == {"lambda1": 0.5}
    assert load_config(path, {"method.name": "fedavg"}).method.options == {}


def test_options_are_those_of_the_new_method_in_whatever_order_they_are_given():
    options, name = {"method.options": {"mu": 0.5}}, {"method.name": "fedprox"}
    for overrides in (options | name, name | options):
        assert load_config("demo", overrides).method.options == {"mu": 0.5}


def test_replace_leaves_the_original():
    config = Config()
    assert config.replace({"train.rounds": 3}).train.rounds == 3
    assert config.train.rounds == 100
    assert json.loads(config.model_dump_json())["train"]["rounds"] == 100
