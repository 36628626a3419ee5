"""What a model says of a shard's images."""

import torch
from torch import Tensor, nn

from fednca.config import TrainConfig
from fednca.engine.batches import Shard
from fednca.engine.eager import autocast
from fednca.methods.base import Method


@torch.inference_mode()
def predict(method: Method, model: nn.Module, shard: Shard, batch_size: int, config: TrainConfig) -> Tensor:
    """Return probabilities (N, C) of a shard's images, in its order."""
    model.eval()
    parts = []
    for images, _ in shard.batches(batch_size):
        with autocast(images.device, config):
            logits = model(images).logits
        parts.append(method.learner.probabilities(logits.float() if logits.dtype == torch.bfloat16 else logits))
    return torch.cat(parts)
