"""Building a model: the encoder, and the head of the method's learner."""

import copy
from dataclasses import replace

import torch
from torch import nn

from fednca.base.errors import FedncaError
from fednca.base.randomness import seeded
from fednca.config import Config
from fednca.methods.contract import Method, Tensors
from fednca.models import Classifier, Output, build_backbone
from fednca.models.heads import load_constants

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}


def build_model(config: Config, method: Method, classes: tuple[str, ...], *, pretrained: str) -> nn.Module:
    """Build backbone and head, initialised from the training seed."""
    with seeded(config.seed, "init"):
        backbone = build_backbone(
            config.model.backbone, pretrained=pretrained, norm=config.model.norm, image_size=config.data.image_size
        )
        model = Classifier(backbone, build_head(method, classes, backbone.dim))
        output = try_out(model, config, min(2, config.train.batch_size))
        check_output(output, method, len(classes))
    return model.to(DTYPES[config.train.precision]).to(memory_format=torch.channels_last)  # as batches lie


def build_head(method: Method, classes: tuple[str, ...], dim: int) -> nn.Module:
    """Build the head of the method's learner."""
    try:
        head = method.learner.build_head(classes, dim)
    except NotImplementedError:
        raise FedncaError(f"the learner of method '{method.name}' has no build_head; let it build a Head") from None
    if not isinstance(head, nn.Module):
        raise FedncaError(f"the head of method '{method.name}' is a {type(head).__name__}; make it a Head")
    return head


def check_output(output: object, method: Method, classes: int) -> None:
    """Refuse a head that does not return an Output with one logit per class."""
    if not isinstance(output, Output):
        found = type(output).__name__
        raise FedncaError(f"the head of method '{method.name}' returns a {found}; let it return a fednca.models.Output")
    if output.logits.ndim != 2 or output.logits.shape[1] != classes:
        shape = tuple(output.logits.shape)
        raise FedncaError(f"the head of method '{method.name}' gives logits of shape {shape}, not (B, {classes})")


def restore_model(config: Config, method: Method, classes: tuple[str, ...], constants: Tensors) -> nn.Module:
    """Build a model with its saved constants, ready to load its saved weights."""
    if constants:  # else it needs none, or an older version saved none
        method = replace(method, learner=method.learner.sketch())
    model = build_model(config, method, classes, pretrained="none")
    load_constants(model, constants)
    return model


def try_out(model: nn.Module, config: Config, samples: int) -> object:
    """Try the smallest possible batch on a copy in training mode, and refuse a model that cannot train on it.

    Returns what the model makes of the batch.
    """
    size = config.data.image_size
    images = torch.zeros(samples, 3, size, size, dtype=next(model.parameters()).dtype)
    try:
        with torch.no_grad():
            return copy.deepcopy(model).train()(images)
    except (RuntimeError, ValueError, AssertionError, ArithmeticError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise FedncaError(
            f"backbone '{config.model.backbone}' cannot train on batches of {samples} at {size} px ({reason}); "
            "choose another backbone, head, image_size, batch_size or min_samples"
        ) from error
