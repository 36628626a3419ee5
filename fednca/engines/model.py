"""Building a model: the encoder, and the head of the method's learner."""

import copy
from dataclasses import replace

import torch
from torch import nn

from fednca.base.errors import FedncaError
from fednca.base.randomness import seeded
from fednca.config import Config
from fednca.methods.contract import Method, Tensors
from fednca.models import Classifier, build_backbone
from fednca.models.heads import load_constants

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}


def build_model(config: Config, method: Method, classes: tuple[str, ...], *, pretrained: str) -> nn.Module:
    """Build backbone and head, initialised from the training seed."""
    with seeded(config.seed, "init"):
        backbone = build_backbone(
            config.model.backbone, pretrained=pretrained, norm=config.model.norm, image_size=config.data.image_size
        )
        model = Classifier(backbone, method.learner.build_head(classes, backbone.dim))
        try_out(model, config, min(2, config.train.batch_size))
    return model.to(DTYPES[config.train.precision]).to(memory_format=torch.channels_last)  # as batches lie


def restore_model(config: Config, method: Method, classes: tuple[str, ...], constants: Tensors) -> nn.Module:
    """Build a model with its saved constants, ready to load its saved weights."""
    if constants:  # else it needs none, or an older version saved none
        method = replace(method, learner=method.learner.sketch())
    model = build_model(config, method, classes, pretrained="none")
    load_constants(model, constants)
    return model


def try_out(model: nn.Module, config: Config, samples: int) -> None:
    """Try the smallest possible batch on a copy in training mode, and refuse a model that cannot train on it."""
    size = config.data.image_size
    images = torch.zeros(samples, 3, size, size, dtype=next(model.parameters()).dtype)
    try:
        with torch.no_grad():
            copy.deepcopy(model).train()(images)
    except (RuntimeError, ValueError, AssertionError, ArithmeticError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise FedncaError(
            f"backbone '{config.model.backbone}' cannot train on batches of {samples} at {size} px ({reason}); "
            "choose another backbone, image_size, batch_size or min_samples"
        ) from error
