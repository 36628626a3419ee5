"""A site's images: the folder that its site.toml names or, in a simulation, one client of the config's partition."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.config import Config, build_config
from fednca.data.federation import Federation, fingerprint, hold_out
from fednca.data.load import decode, federate, read_dataset
from fednca.data.types import Dataset, FileImages, Split
from fednca.engines.images import Shard
from fednca.engines.workplace import build_store
from fednca.flower.assignment import Assignment
from fednca.flower.classes import check_known, to_joint
from fednca.flower.config import SiteConfig, load_site

FEWEST = 2  # training images of a site: BatchNorm cannot train on one


@dataclass(frozen=True, eq=False)
class Part:
    """Images for one purpose: rows of a split, and labels (n, c) in the site's own classes."""

    split: Split
    rows: NDArray[np.intp]
    labels: NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Site:
    """What a site has: images for train, val and test, and the config that it runs."""

    name: str
    config: Config
    classes: tuple[str, ...]
    parts: dict[str, Part]
    state: Path  # where the method's state stays
    data: str  # digest of what all this was dealt from; it never leaves the site

    def shard(self, part: str, classes: tuple[str, ...], device: torch.device) -> Shard:
        """Return the images of a part with their labels in the federation's classes."""
        check_known(self.name, self.classes, classes)
        own = self.parts[part]
        store = build_store(self.config, own.split.images, device)
        return Shard.build(store, own.rows, to_joint(own.labels, self.classes, classes))


def open_site(context: Context, assignment: Assignment) -> Site:
    """Find out which site this node is, and open its images."""
    if "site" in context.node_config:
        return open_folder(load_site(Path(str(context.node_config["site"]))), assignment)
    if "partition-id" in context.node_config:
        return open_partition(int(context.node_config["partition-id"]), assignment)
    raise FedncaError("this SuperNode has no site; start it with --node-config 'site=\"/path/to/site.toml\"'")


def open_folder(settings: SiteConfig, assignment: Assignment) -> Site:
    """Open a folder of images with a table of labels; the server's config cannot name any file of the site."""
    own = {f"data.{name}": getattr(settings, name) for name in ("root", "options", "on_corrupt", "cache")}
    own |= {"data.name": "folder", "device": settings.device, "threads": settings.threads or assignment.config.threads}
    config = assignment.config.replace(own)
    table = read_dataset(config)
    dataset = decode(table, config)
    parts = split_parts(dataset, settings)
    names = [os.path.relpath(path, settings.root) for path in image_paths(table)]  # so the whole folder may move
    data = digest_data(dataset, parts, names)
    return Site(settings.name, config, dataset.classes, parts, Path(settings.state) / assignment.run, data)


def split_parts(dataset: Dataset, settings: SiteConfig) -> dict[str, Part]:
    """Split a site's images into train, val and test."""
    train, val = dataset.train, dataset.val
    if val is None:
        rows, held_out = hold_out(train, settings.val_fraction, int(settings.options.get("seed", 0)))
        parts = {"train": _part(train, rows), "val": _part(train, held_out)}
    else:
        parts = {"train": _part(train), "val": _part(val)}
    return parts | {"test": _part(dataset.test)}


def digest_data(dataset: Dataset, parts: Mapping[str, Part], names: Sequence[str] = ()) -> str:
    """Digest labels and groups (as a run's partition.npz does), which image is in which part, and the file names."""
    digest = blake2b(fingerprint(dataset, *dataset.splits()).encode(), digest_size=16)
    for own in parts.values():
        digest.update(own.rows.tobytes())
    digest.update(repr(names).encode())
    return digest.hexdigest()


def image_paths(table: Dataset) -> list[Path]:
    """Return the paths of all images."""
    files = [split.images.paths for split in table.splits() if isinstance(split.images, FileImages)]
    return [path for paths in files for path in paths]


def open_partition(client: int, assignment: Assignment) -> Site:
    """Open one client of the config's own partition; test images go to the clients in turn."""
    federation = _federate(assignment.config.model_dump_json())
    clients = len(federation.train.partition.clients)
    if client >= clients:
        raise FedncaError(f"there is no client {client} among {clients}; start as many nodes as clients")
    test = federation.dataset.test
    parts = {
        "train": Part(federation.train.split, *federation.train.client(client)),
        "val": Part(federation.val.split, *federation.val.client(client)),
        "test": _part(test, np.arange(client, len(test), clients)),
    }
    name = simulated_names(clients)[client]
    data = digest_data(federation.dataset, parts)
    return Site(name, assignment.config, federation.dataset.classes, parts, Path(assignment.folder) / name, data)


def simulated_names(clients: int) -> list[str]:
    """Name the clients of a simulation so that their names sort in their order.

    >>> simulated_names(2)
    ['client-0000', 'client-0001']
    """
    return [f"client-{client:04d}" for client in range(clients)]


def _part(split: Split, rows: NDArray[np.intp] | None = None) -> Part:
    rows = np.arange(len(split)) if rows is None else rows
    return Part(split, rows, split.labels[rows])


@lru_cache(maxsize=1)  # a worker of a simulation plays many clients of the same federation
def _federate(config: str) -> Federation:
    return federate(build_config(json.loads(config)))
