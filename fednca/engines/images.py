"""From rows of a uint8 image array to normalised batches on the device."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednca.data.store import StoredImages

Moments = tuple[tuple[float, float, float], tuple[float, float, float]]  # mean and standard deviation per channel
IMAGENET: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Moments = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
AT_ONCE = 1024  # images copied to a device at a time

Change = Callable[[Tensor], Tensor]  # of images (B, 3, H, W) in [0, 1]


@dataclass(frozen=True)
class ImageStore:
    """All images of a split, on the device if they fit, else memory-mapped; and the numbers that normalise them."""

    pixels: Tensor | StoredImages  # uint8 (N, H, W, 3)
    mean: Tensor  # (3,), on the device, in the precision of training
    std: Tensor

    @classmethod
    def build(
        cls, images: NDArray[np.uint8] | StoredImages, moments: Moments, device: torch.device, dtype: torch.dtype
    ) -> Self:
        """Take images (N, H, W, 3) to the device if it has room for them."""
        mean, std = (torch.tensor(m, device=device, dtype=dtype) * 255 for m in moments)
        files = images.files if isinstance(images, StoredImages) else (images,)
        if device.type == "cpu" or math.prod(images.shape) > room(device):
            return cls(StoredImages(files), mean, std)
        pixels = torch.empty(images.shape, dtype=torch.uint8, device=device)
        start = 0
        for file in files:
            for some in (file[first : first + AT_ONCE] for first in range(0, len(file), AT_ONCE)):
                pixels[start : start + len(some)] = torch.from_numpy(np.array(some))  # torch needs a writable array
                start += len(some)
        return cls(pixels, mean, std)

    def gather(self, rows: Tensor, change: Change | None = None) -> Tensor:
        """Return normalised images (B, 3, H, W), channels last in memory; `change` is applied to the raw ones first."""
        if isinstance(self.pixels, StoredImages):
            pixels = torch.from_numpy(self.pixels.take(rows.numpy())).to(self.mean.device)
        else:
            pixels = self.pixels[rows]
        images = pixels.to(self.mean.dtype)
        if change is not None:
            images = change(images.permute(0, 3, 1, 2) / 255).permute(0, 2, 3, 1) * 255
        return ((images - self.mean) / self.std).permute(0, 3, 1, 2)


def room(device: torch.device) -> int:
    """Return how many bytes of images a CUDA device may hold: half of its free memory, as training needs the rest."""
    return torch.cuda.mem_get_info(device)[0] // 2


@dataclass(frozen=True)
class Shard:
    """One client's images, as rows of a store, and their labels as this client knows them."""

    store: ImageStore
    rows: Tensor  # int64 (n,), on the same device as the pixels
    labels: Tensor  # (n, C): 1, 0, or -1 for unknown, on the device

    @classmethod
    def build(cls, store: ImageStore, rows: NDArray[np.intp], labels: NDArray[np.int8]) -> Self:
        """Put the rows next to the pixels, and the labels on the device."""
        home = "cpu" if isinstance(store.pixels, StoredImages) else store.pixels.device
        return cls(store, torch.from_numpy(rows).to(home), torch.from_numpy(labels).to(store.mean))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def batches(
        self, size: int, rng: torch.Generator | None = None, change: Change | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) of every image once, in the generator's random order or, without one, as stored."""
        order = torch.arange(len(self)) if rng is None else torch.randperm(len(self), generator=rng)
        rows, labels = self.rows[order.to(self.rows.device)], self.labels[order.to(self.labels.device)]
        for start, stop in batch_bounds(len(self), size):
            yield self.store.gather(rows[start:stop], change), labels[start:stop]


def batch_bounds(samples: int, size: int) -> list[tuple[int, int]]:
    """Cut samples into batches; a last single sample joins the batch before it, since BatchNorm needs two.

    >>> batch_bounds(9, 4), batch_bounds(0, 4)
    ([(0, 4), (4, 9)], [])
    """
    starts = list(range(0, samples, size))
    if len(starts) > 1 and samples - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], samples][: len(starts)], strict=True))
