"""From rows of a resident uint8 image array to normalised batches on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Moments = tuple[tuple[float, float, float], tuple[float, float, float]]  # mean and standard deviation per channel
IMAGENET: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Moments = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class ImageStore:
    """All images of a split on the device, and how they are normalised."""

    pixels: Tensor  # uint8 (N, H, W, 3)
    mean: Tensor  # (3,), in the arithmetic of training
    std: Tensor

    @classmethod
    def build(cls, images: NDArray[np.uint8], moments: Moments, device: torch.device, dtype: torch.dtype) -> Self:
        """Move images (N, H, W, 3) to the device."""
        mean, std = (torch.tensor(m, device=device, dtype=dtype) * 255 for m in moments)
        return cls(torch.from_numpy(images).to(device), mean, std)

    def gather(self, rows: Tensor) -> Tensor:
        """Return normalised images (B, 3, H, W), channels last in memory."""
        pixels = self.pixels[rows].to(self.mean.dtype)
        return ((pixels - self.mean) / self.std).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Shard:
    """One client's images: rows of a store, and its own view of their labels."""

    store: ImageStore
    rows: Tensor  # int64 (n,)
    labels: Tensor  # (n, C): 1, 0, or -1 for unknown

    @classmethod
    def build(cls, store: ImageStore, rows: NDArray[np.intp], labels: NDArray[np.int8]) -> Self:
        """Move rows and labels beside the store's pixels."""
        device = store.pixels.device
        return cls(store, torch.from_numpy(rows).to(device), torch.from_numpy(labels).to(device, store.mean.dtype))

    def __len__(self) -> int:
        """Count the images."""
        return len(self.rows)

    def batches(self, size: int, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) once through, in the generator's random order or, without one, as stored."""
        order = torch.arange(len(self)) if rng is None else torch.randperm(len(self), generator=rng)
        order = order.to(self.rows.device)
        for start, stop in batch_bounds(len(self), size):
            chosen = order[start:stop]
            yield self.store.gather(self.rows[chosen]), self.labels[chosen]


def batch_bounds(samples: int, size: int) -> list[tuple[int, int]]:
    """Cut samples into batches; a last batch of one joins the one before it, since BatchNorm needs two.

    >>> batch_bounds(9, 4)
    [(0, 4), (4, 9)]
    """
    starts = list(range(0, samples, size))
    if len(starts) > 1 and samples - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], samples], strict=True))
