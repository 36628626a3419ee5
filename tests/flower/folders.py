"""Sites with real images: scikit-learn's handwritten digits as PNG files with a CSV of labels."""

import csv
import shutil
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

PARTS = ("train", "train", "train", "train", "val", "test")


def write_sites(folder: Path, classes: dict[str, list[str]], images: int) -> dict[str, Path]:
    """Give each site its own images of the digits it knows, and return the path of each site.toml."""
    digits = load_digits()
    rows = iter(np.random.default_rng(0).permutation(len(digits.target)))
    return {site: _write_site(folder / site, site, own, digits, rows, images) for site, own in classes.items()}


def _write_site(folder, site, classes, digits, rows, images) -> Path:
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "split", *classes])
        for number in range(images):
            row = next(row for row in rows if f"digit {digits.target[row]}" in classes)
            pixels = np.rint(digits.images[row] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
            shown = f"digit {digits.target[row]}"
            labels = [int(name == shown) for name in classes]
            table.writerow([f"{number}.png", PARTS[number % len(PARTS)], *labels])
    path = folder / "site.toml"
    path.write_text(f'name = "{site}"\ndevice = "cpu"\nthreads = 1\ncache = "cache"\n')
    return path


def join_sites(sites: dict[str, Path], classes: list[str], folder: Path) -> Path:
    """Put everybody's images into one folder; a site's labels for classes that it does not know stay empty."""
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["image", "split", "site", *classes])
        table.writeheader()
        for site, path in sites.items():
            with (path.parent / "labels.csv").open(newline="") as own:
                for row in csv.DictReader(own):
                    name = f"{site}-{row['image']}"
                    shutil.copy(path.parent / "images" / row["image"], folder / "images" / name)
                    table.writerow(row | {"image": name, "site": site})
    return folder
