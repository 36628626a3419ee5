"""Building the workplace of an engine: images, labels and model on their device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fednca.base.errors import FedncaError
from fednca.config import Config
from fednca.data.federation import Federation
from fednca.data.store import StoredImages
from fednca.data.types import FileImages
from fednca.engines.images import HALF, IMAGENET, ImageStore, Shard
from fednca.engines.local import Workplace
from fednca.engines.model import DTYPES, try_out
from fednca.methods.contract import Method


def build_workplace(
    config: Config, method: Method, federation: Federation, model: nn.Module, device: torch.device
) -> Workplace:
    """Put images, labels and model on the device."""
    torch.backends.cudnn.deterministic = True  # a run can be repeated exactly
    train, val, test = federation.train, federation.val, federation.dataset.test
    store = build_store(config, train.split.images, device)
    clients = range(len(train.partition.clients))
    parts = [train.everything()] if method.rule.centralized else [train.client(k) for k in clients]
    shards = [Shard.build(store, *part) for part in parts]
    if min(map(len, shards)) == 1:
        try_out(model, config, 1)
    val_store = store if val.split is train.split else build_store(config, val.split.images, device)
    return Workplace(
        config=config,
        method=method,
        model=model.to(device),
        train=shards,
        val=Shard.build(val_store, *val.union()),
        val_sizes=[len(rows) for rows in val.partition.clients],
        test=Shard.build(build_store(config, test.images, device), np.arange(len(test)), test.labels),
        device=device,
    )


def build_store(
    config: Config, images: NDArray[np.uint8] | FileImages | StoredImages, device: torch.device
) -> ImageStore:
    """Put images on the device, with the normalisation that fits the backbone's weights."""
    if isinstance(images, FileImages):
        raise FedncaError("the images are still files; load the dataset with fednca.data.load_dataset")
    normalize = config.data.normalize
    if normalize == "auto":
        normalize = "half" if config.model.pretrained == "none" else "imagenet"
    moments = IMAGENET if normalize == "imagenet" else HALF
    return ImageStore.build(images, moments, device, DTYPES[config.train.precision])
