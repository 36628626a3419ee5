"""Images and model as an engine finds them at its workplace."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny

from fednca.base.errors import FedncaError
from fednca.data.load import federate
from fednca.engines.images import HALF, IMAGENET
from fednca.engines.model import build_model
from fednca.engines.workplace import build_store, build_workplace
from fednca.methods import create_method


@pytest.mark.parametrize(
    ("pretrained", "normalize", "moments"),
    [
        ("none", "auto", HALF),
        ("timm", "auto", IMAGENET),
        ("timm", "half", HALF),
        ("none", "imagenet", IMAGENET),
    ],
)
def test_images_are_normalised_as_the_backbones_weights_want_them(pretrained, normalize, moments):
    config = tiny(model__pretrained=pretrained, data__normalize=normalize)
    store = build_store(config, np.zeros((1, 16, 16, 3), np.uint8), torch.device("cpu"))
    for found, known in zip((store.mean, store.std), moments, strict=True):
        torch.testing.assert_close(found / 255, torch.tensor(known, dtype=found.dtype))


def test_a_client_of_one_image_is_refused_in_one_sentence_where_batch_norm_needs_two():
    config = tiny(method__name="fedavg", model__backbone="resnet18", data__image_size=32, train__precision="float64")
    method, federation = create_method(config), federate(config)
    model = build_model(config, method, federation.dataset.classes, pretrained="none")
    dealt = federation.train.partition
    alone = replace(dealt, clients=(dealt.clients[0][:1], *dealt.clients[1:]))
    federation = replace(federation, train=replace(federation.train, partition=alone))
    with pytest.raises(FedncaError, match=r"'resnet18' cannot train on batches of 1 at 32 px.*min_samples"):
        build_workplace(config, method, federation, model, torch.device("cpu"))
