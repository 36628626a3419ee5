"""Load the configured dataset at the configured size, and divide it among the clients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fednca.base.errors import FedncaError
from fednca.base.files import cache_folder
from fednca.config import Config, validate
from fednca.config.options import Options
from fednca.data.federation import Federation, build_federation, without_validation
from fednca.data.fetch import Progress
from fednca.data.sources import get_source
from fednca.data.store import NOTE, StoredImages, open_store, verify_store
from fednca.data.types import Dataset, Split

MOST_NAMED = 5  # sites in a sentence


def data_options(config: Config) -> Options:
    """Return the dataset's options from the config, checked."""
    return validate(get_source(config.data.name).Options, config.data.options, "data.options")


def read_dataset(config: Config) -> Dataset:
    """Read the configured dataset, with its images as they are."""
    dataset = get_source(config.data.name).load(data_options(config), data_root(config))
    if not isinstance(dataset, Dataset):
        found = type(dataset).__name__
        raise FedncaError(f"dataset '{config.data.name}' loads a {found}; let `load` return a fednca.data.Dataset")
    return dataset


def load_dataset(config: Config, progress: Progress | None = None, *, verify: bool = False) -> Dataset:
    """Load the configured dataset at the configured size."""
    return decode(read_dataset(config), config, progress, verify=verify)


def decode(dataset: Dataset, config: Config, progress: Progress | None = None, *, verify: bool = False) -> Dataset:
    """Return the dataset at the configured size; images are decoded and resized once, then kept in a store.

    With `verify`, the store's checksums are checked.
    """

    def ready(part: str, split: Split) -> Split:
        told = None if progress is None else partial(progress, f"{dataset.name} {part}")
        return at_size(split, config, told, verify)

    val = None if dataset.val is None else ready("val", dataset.val)
    return replace(dataset, train=ready("train", dataset.train), val=val, test=ready("test", dataset.test))


def at_size(split: Split, config: Config, progress: Callable[[int, int], None] | None, verify: bool) -> Split:
    """Return the split with stored images of the configured size, without those that cannot be read."""
    images, size = split.images, config.data.image_size
    if isinstance(images, StoredImages) or (isinstance(images, np.ndarray) and images.shape[1:3] == (size, size)):
        return split
    folder = Path(config.data.cache) if config.data.cache else cache_folder() / "images"
    stored = open_store(images, size, folder=folder, on_corrupt=config.data.on_corrupt, progress=progress)
    if verify:
        verify_store(stored.folder)
    rows = stored.rows
    groups, sites = (None if numbers is None else numbers[rows] for numbers in (split.groups, split.sites))
    listed_in = stored.folder / NOTE if stored.left_out else None
    return Split(stored.images, split.labels[rows], groups, sites, stored.left_out, listed_in)


def data_root(config: Config) -> Path:
    """Return the folder of the dataset's files: as configured, else `data/NAME`."""
    return Path(config.data.root) if config.data.root else Path("data") / config.data.name


def federate(config: Config, progress: Progress | None = None) -> Federation:
    """Load the configured dataset and divide it among the clients."""
    settings = config.partition.model_dump()
    federation = build_federation(load_dataset(config, progress), **settings, val_fraction=config.data.val_fraction)
    sizes = {"validation": len(federation.val.union()[0]), "test": len(federation.dataset.test)}
    for part, size in sizes.items():
        if not size:
            way_out = "give it some by its options or its table"
            raise FedncaError(f"{federation.dataset.name} has no {part} images with these settings; {way_out}")
    return federation


def unreadable_note(dataset: Dataset, listed_in: str = "") -> str:
    """Return a sentence on how many images are left out and where they are listed, or nothing if there are none."""
    splits = [split for split in dataset.splits() if split.unreadable]
    count = sum(len(split.unreadable) for split in splits)
    places = listed_in or " and ".join(f"'{split.listed_in}'" for split in splits)
    return f"images left out because they cannot be read: {count}, listed in {places}" if splits else ""


def sites_note(config: Config, federation: Federation) -> str:
    """Return a sentence that names the natural sites without validation images, or nothing if there are none."""
    names = without_validation(federation) if config.partition.kind == "natural" else []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    listed = ", ".join(names[:MOST_NAMED]) + more
    return f"sites without validation images: {listed}" if names else ""
