"""From a config to the parts of a run: dataset, federation, model, and the job that engines execute."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fednca.config import Config, validate
from fednca.data.federation import Federation, build_federation, without_validation
from fednca.data.fetch import Progress
from fednca.data.sources import get_source
from fednca.data.store import NOTE, StoredImages, open_store, verify_store
from fednca.data.types import Dataset, FileImages, Split
from fednca.engine.batches import HALF, IMAGENET, ImageStore, Shard
from fednca.engine.choose import choose_engine
from fednca.engine.loop import Job
from fednca.errors import FedncaError
from fednca.files import cache_folder
from fednca.methods.base import Method, Task
from fednca.models import Classifier, build_backbone
from fednca.options import Options
from fednca.randomness import seeded

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
MOST_NAMED = 5  # sites in a sentence


def data_options(config: Config) -> Options:
    """Return the dataset's options as it takes them."""
    return validate(get_source(config.data.name).Options, config.data.options, "data.options")


def read_dataset(config: Config) -> Dataset:
    """Load the configured dataset with its images as they are."""
    return get_source(config.data.name).load(data_options(config), data_root(config))


def load_dataset(config: Config, progress: Progress | None = None, *, verify: bool = False) -> Dataset:
    """Load the configured dataset at the configured size."""
    return decode(read_dataset(config), config, progress, verify=verify)


def decode(dataset: Dataset, config: Config, progress: Progress | None = None, *, verify: bool = False) -> Dataset:
    """Bring a dataset that was read to the configured size; images are decoded and resized once, then kept.

    With `verify`, the checksums of what was kept are recomputed.
    """

    def ready(part: str, split: Split) -> Split:
        return at_size(split, config, partial(progress or _silent, f"{dataset.name} {part}"), verify)

    val = None if dataset.val is None else ready("val", dataset.val)
    return replace(dataset, train=ready("train", dataset.train), val=val, test=ready("test", dataset.test))


def at_size(split: Split, config: Config, progress: Callable[[int, int], None], verify: bool) -> Split:
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


def _silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def data_root(config: Config) -> Path:
    """Return the folder of the dataset's files: as configured, else `data/NAME`."""
    return Path(config.data.root) if config.data.root else Path("data") / config.data.name


def federate(config: Config, progress: Progress | None = None) -> Federation:
    """Load the configured dataset and deal it to the clients."""
    settings = config.partition.model_dump()
    federation = build_federation(load_dataset(config, progress), **settings, val_fraction=config.data.val_fraction)
    sizes = {"validation": len(federation.val.union()[0]), "test": len(federation.dataset.test)}
    for part, size in sizes.items():
        if not size:
            way_out = "give it some by its options or its table"
            raise FedncaError(f"{federation.dataset.name} has no {part} images with these settings; {way_out}")
    return federation


def unreadable_note(dataset: Dataset, listed_in: str = "") -> str:
    """Say how many images are left out and what lists them, the stores unless told; empty where there are none."""
    splits = [split for split in dataset.splits() if split.unreadable]
    count = sum(len(split.unreadable) for split in splits)
    places = listed_in or " and ".join(f"'{split.listed_in}'" for split in splits)
    return f"images left out because they cannot be read: {count}, listed in {places}" if splits else ""


def sites_note(config: Config, federation: Federation) -> str:
    """Name the sites of a natural partition that have no validation images; empty where there are none."""
    names = without_validation(federation) if config.partition.kind == "natural" else []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    told = ", ".join(names[:MOST_NAMED]) + more
    return f"sites without validation images: {told}" if names else ""


def build_model(config: Config, method: Method, classes: tuple[str, ...], *, pretrained: str) -> nn.Module:
    """Build backbone and head, initialised from the training seed."""
    with seeded(config.seed, "init"):
        backbone = build_backbone(
            config.model.backbone, pretrained=pretrained, norm=config.model.norm, image_size=config.data.image_size
        )
        model = Classifier(backbone, method.learner.head(Task(classes, backbone.dim)))
        try_out(model, config, min(2, config.train.batch_size))
    return model.to(DTYPES[config.train.precision]).to(memory_format=torch.channels_last)  # as batches lie


def try_out(model: nn.Module, config: Config, samples: int) -> None:
    """Train a copy's forward pass on the smallest batch there may be, so that a misfit shows before a run begins."""
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


def build_job(config: Config, method: Method, federation: Federation, model: nn.Module, device: torch.device) -> Job:
    """Put images, labels and model on the device."""
    torch.backends.cudnn.deterministic = True  # a run repeats itself
    train, val, test = federation.train, federation.val, federation.dataset.test
    store = build_store(config, train.split.images, device)
    if method.centralized:
        shards = [Shard.build(store, *train.everything())]
    else:
        shards = [Shard.build(store, *train.client(k)) for k in range(len(train.partition.clients))]
    if min(map(len, shards)) == 1:
        try_out(model, config, 1)
    val_store = store if val.split is train.split else build_store(config, val.split.images, device)
    judged = [
        Shard.build(val_store, *val.union()),
        Shard.build(build_store(config, test.images, device), np.arange(len(test)), test.labels),
    ]
    model = model.to(device)
    return Job(
        config=config,
        method=method,
        model=model,
        engine=choose_engine(config, method, model, shards, judged, device),
        train=shards,
        val=judged[0],
        val_sizes=[len(rows) for rows in val.partition.clients],
        test=judged[1],
    )


def build_store(
    config: Config, images: NDArray[np.uint8] | FileImages | StoredImages, device: torch.device
) -> ImageStore:
    """Put images on the device, with the normalisation that fits the backbone's weights."""
    if isinstance(images, FileImages):
        raise FedncaError("the images are still files; load the dataset with fednca.setup.load_dataset")
    normalize = config.data.normalize
    if normalize == "auto":
        normalize = "half" if config.model.pretrained == "none" else "imagenet"
    moments = IMAGENET if normalize == "imagenet" else HALF
    return ImageStore.build(images, moments, device, DTYPES[config.train.precision])


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Run a block with this many threads per CPU operation, then set the old number again."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(name: str) -> torch.device:
    """Return the device by name; `auto` is the GPU where there is one."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues of a GPU: the default's 8 hold up more streams
    device = read_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise FedncaError(f"device '{name}' is not there: torch finds {torch.cuda.device_count()} CUDA devices")
    return device


def read_device(name: str) -> torch.device:
    """Return the device by name, whether it is there or not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise FedncaError(f"device '{name}' is not known (known: auto, cpu, cuda, cuda:N)")
    return device
