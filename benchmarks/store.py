"""Time building, reopening and reading an image store, beside a torchvision ImageFolder DataLoader on the same files.

python benchmarks/store.py FOLDER [--size 224]     FOLDER holds the JPEG or PNG files
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from peers.flags import call
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fednca.data.processes import cores
from fednca.data.store import Stored, StoredImages, open_store
from fednca.data.types import FileImages

BATCH = 32
SUFFIXES = (".jpg", ".jpeg", ".png")
LOADER_WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the image store beside an ImageFolder DataLoader.")
    parser.add_argument("folder", type=Path, help="a folder of image files")
    parser.add_argument("--size", type=int, default=224, help="side of the stored images in pixels")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement; the best one counts")
    settings = parser.parse_args()
    paths = tuple(sorted(path for path in settings.folder.glob("*") if path.suffix.lower() in SUFFIXES))
    if not paths:
        parser.error(f"'{settings.folder}' holds no file that ends in {', '.join(SUFFIXES)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        table = measure(FileImages(paths), settings.size, settings.repeats, Path(temporary))
    Console().print(table)


def measure(files: FileImages, size: int, repeats: int, temporary: Path) -> Table:
    """Time all rows in turn and take the best of each, since other work on the machine can only slow them down."""
    folder, loader = temporary / "store", image_folder_loader(files, size, temporary / "classes")
    seconds: dict[str, list[float]] = {"one": [], "all": [], "open": []}
    speeds: dict[str, list[float]] = {"store": [], "loader": []}
    warm_up(files)
    for _ in range(repeats):
        for name, workers in (("one", 1), ("all", cores())):
            shutil.rmtree(folder, ignore_errors=True)
            seconds[name].append(timed(lambda workers=workers: open_store(files, size, folder=folder, workers=workers)))
        seconds["open"].append(timed(lambda: open_and_take(files, size, folder)))
        stored = open_store(files, size, folder=folder)
        speeds["store"].append(images_per_second(store_batches(stored.images)))
        speeds["loader"].append(images_per_second(batch for batch, _ in loader))
    one, every, opened = map(min, seconds.values())
    store, imagefolder = map(max, speeds.values())
    title = f"{len(files):,} images at {size} px, {cores()} cores, load {os.getloadavg()[0]:.1f}, best of {repeats}"
    table = Table("what", "measured", "ratio", title=title)
    table.add_row("build, 1 worker", f"{one:.2f} s", "1.00x")
    table.add_row(f"build, {cores()} workers", f"{every:.2f} s", f"{one / every:.2f}x")
    table.add_row("reopen and take the first batch", f"{opened:.3f} s", "")
    table.add_row(f"ImageFolder DataLoader, {LOADER_WORKERS} workers", f"{imagefolder:,.0f} images/s", "1.0x")
    table.add_row("random batches from the store", f"{store:,.0f} images/s", f"{store / imagefolder:.1f}x")
    return table


def warm_up(files: FileImages) -> None:
    """Read every file once, so that no row pays for a cold disk."""
    for path in files.paths:
        path.read_bytes()


def open_and_take(files: FileImages, size: int, folder: Path) -> Stored:
    stored = open_store(files, size, folder=folder)
    stored.images.take(np.arange(min(BATCH, len(stored.images))))
    return stored


def store_batches(images: StoredImages) -> Iterator[torch.Tensor]:
    order = np.random.default_rng(0).permutation(len(images))
    for start in range(0, len(order), BATCH):
        yield torch.from_numpy(images.take(order[start : start + BATCH]))


def image_folder_loader(files: FileImages, size: int, classes: Path) -> DataLoader:
    """Return a DataLoader of byte batches like the store's; links make the class folder that ImageFolder needs."""
    one = classes / "images"
    one.mkdir(parents=True)
    for path in files.paths:
        (one / path.name).symlink_to(path.absolute())
    transform = v2.Compose([v2.Resize((size, size), antialias=True), v2.PILToTensor()])
    dataset = ImageFolder(str(classes), transform)
    # Persistent workers are the fastest; starting processes is not timed for either row.
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=LOADER_WORKERS, persistent_workers=True)


def images_per_second(batches: Iterator[torch.Tensor]) -> float:
    """Read one epoch; the clock starts after the first batch, when processes run and pages are mapped."""
    next(batches)
    start = time.perf_counter()
    count = sum(len(batch) for batch in batches)
    return count / (time.perf_counter() - start)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    call(main)
