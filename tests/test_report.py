import re
from pathlib import Path

import pytest
import torch
from helpers import tiny

from fednca.data.load import federate
from fednca.engines.eager import EagerEngine
from fednca.engines.model import build_model
from fednca.engines.workplace import build_workplace
from fednca.methods import create_method, find_method, method_names
from fednca.methods.contract import Server
from fednca.report.methods import page, upload


def test_the_page_of_methods_is_up_to_date():
    path = Path(__file__).parent.parent / "docs/methods.md"
    assert path.read_text() == page(), "run: python -m fednca.report.methods > docs/methods.md"


def test_every_row_of_the_page_has_as_many_cells_as_its_head():
    cells = [len(re.split(r"(?<!\\)\|", line)) for line in page().splitlines() if line.startswith("|")]
    assert set(cells) == {len(["", "option", "part", "default", "what", ""]), 7 + 2}


@pytest.mark.parametrize("name", method_names())
def test_the_page_of_methods_names_all_choices_of_an_option(name):
    section = page().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    rows = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}
    for part in find_method(name).parts.values():
        for option, schema in part.model_json_schema().get("properties", {}).items():
            for choice in schema.get("enum", []):
                assert f"`{choice}`" in rows[option].rpartition(" | ")[2]


def test_the_upload_of_fedavg_is_resnet18_with_a_linear_head():
    # torchvision's ResNet-18 has 11,689,512 parameters with a 1000-way head of 513,000; its 20 BatchNorms keep
    # mean and variance of 4,800 channels in float32 and one int64 counter each
    parameters = 11_689_512 - 513_000 + 512 * 20 + 20
    assert upload(find_method("fedavg"), 20) == 4 * (parameters + 2 * 4_800) + 8 * 20


@pytest.mark.parametrize("name", method_names())
def test_what_a_client_uploads_is_what_the_method_declares(name):
    config = tiny(method__name=name)
    method, federation = create_method(config), federate(config)
    model = build_model(config, method, federation.dataset.classes, pretrained="none")
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    trainable = {key: weights[key] for key, p in model.named_parameters() if p.requires_grad}
    engine = EagerEngine(build_workplace(config, method, federation, model, torch.device("cpu")))
    server = Server(weights, method.rule.start_server(trainable, clients=3))
    (trained,) = engine.train(1, [0], server, {})
    assert trained.update.weights.keys() == weights.keys()
    sent = sum(tensor.nbytes for tensor in trained.update.extra.values())
    assert sent == method.rule.copies * sum(tensor.nbytes for tensor in trainable.values())
