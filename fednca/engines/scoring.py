"""Scoring a shard's images with a model."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fednca.config import TrainConfig
from fednca.engines.images import Shard
from fednca.methods.contract import Method


@torch.inference_mode()
def predict(method: Method, model: nn.Module, shard: Shard, batch_size: int, config: TrainConfig) -> Tensor:
    """Return the probabilities (N, C) of a shard's images, in order."""
    model.eval()
    parts = []
    for images, _ in shard.batches(batch_size):
        parts.append(score(method, model, images, config))
    return torch.cat(parts)


def score(method: Method, model: nn.Module, images: Tensor, config: TrainConfig) -> Tensor:
    """Return the probabilities (B, C) of a batch of images."""
    with autocast(images.device, config):
        logits = model(images).logits
    return method.learner.probabilities(logits.float() if logits.dtype == torch.bfloat16 else logits)


def autocast(device: torch.device, config: TrainConfig) -> AbstractContextManager[object]:
    """Return the context that sets the configured precision."""
    if config.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
