"""Work as files, for workers in new processes, which load what they need once and keep it."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fednca.config import Config, load_config
from fednca.engines.images import ImageStore, Shard
from fednca.engines.model import build_model
from fednca.methods import create_method
from fednca.methods.contract import Method
from peers.work import Work, own_store


def save(work: Work, folder: Path) -> None:
    """Write config, class names, initial weights and, for each client, its images and labels."""
    (folder / "work.toml").write_text(work.config.to_toml())
    (folder / "classes.txt").write_text("\n".join(work.classes))
    save_file({name: tensor.contiguous() for name, tensor in work.initial.items()}, folder / "initial.safetensors")
    for client, shard in enumerate(map(own_store, work.shards)):
        store = shard.store
        torch.save((store.pixels, store.mean, store.std, shard.labels), folder / f"{client}.pt")


@cache
def load_parts(folder: str) -> tuple[Config, Method, nn.Module, tuple[str, ...]]:
    """Build what all rounds share: config, method, model and class names."""
    config = load_config(Path(folder) / "work.toml")
    method = create_method(config)
    classes = tuple((Path(folder) / "classes.txt").read_text().splitlines())
    return config, method, build_model(config, method, classes, pretrained="none"), classes


@cache
def load_client(folder: str, client: int) -> Shard:
    """Load one client's images and labels."""
    pixels, mean, std, labels = torch.load(Path(folder) / f"{client}.pt")
    return Shard(ImageStore(pixels, mean, std), torch.arange(len(pixels)), labels)


def load(folder: str) -> Work:
    """Load the whole work."""
    config, method, model, classes = load_parts(folder)
    initial = load_file(Path(folder) / "initial.safetensors")
    shards = [load_client(folder, client) for client in range(len(list(Path(folder).glob("*.pt"))))]
    return Work(config, method, model, initial, torch.device("cpu"), classes, shards, None)
