"""Passes over all images of a shard at fixed addresses, so that CUDA graphs can replay them.

This is to passes that change no weight (scores, and sums for a method) what a `Slot` is to steps. A shard's rows and
labels are copied to fixed places; each replay visits the batch at the cursor and moves the cursor on (see `graphs`).
"""

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from fednca.engines.graphs.lanes import Lane
from fednca.engines.graphs.slots import Common, Frozen
from fednca.engines.images import ImageStore, Shard, batch_bounds
from fednca.engines.local_update import add_up
from fednca.engines.scoring import score
from fednca.methods.contract import Tensors

Visit = Callable[[Tensor, Tensor, Tensor], None]  # of places in a shard (B,), images (B, 3, H, W) and labels (B, C)
Tell = Callable[[Tensor, Tensor], Tensors]  # of images and labels


class Passes:
    """Goes through the images of a shard, and has a model that is not trained to score them.

    What is captured under a name reads and writes the same memory whenever it is done.
    """

    def __init__(self, common: Common, classes: int, room: int) -> None:
        self.common, self.lane = common, Lane(common.device, renews=False)
        self.frozen = Frozen(common, common.start.clone())
        self.totals: dict[Hashable, Tensors] = {}  # where sums are added up, by name
        self.uncaptured: set[Hashable] = set()  # names of what graphs cannot do
        self.stores: dict[int, ImageStore] = {}  # which graphs read from; kept, so that no id comes again
        self._make_room(room, classes)

    def _make_room(self, room: int, classes: int) -> None:
        """Renew the places that graphs know, and so drop the graphs, which would go on to use the old ones."""
        device, dtype = self.common.device, self.common.store.mean.dtype
        self.rows, self.offsets = torch.zeros(room, dtype=torch.int64, device=device), torch.arange(room, device=device)
        self.labels, self.scores = torch.zeros(2, room, classes, dtype=dtype, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.lane.graphs.clear()

    def load(self, weights: Tensors) -> None:
        """Let the model have these weights."""
        self.frozen.values.load(weights)
        self.frozen.renew()

    def score(self, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that the model gives a shard's images."""

        def visit(at: Tensor, images: Tensor, labels: Tensor) -> None:
            scores = score(self.common.method, self.frozen.model, images, self.common.config)
            self.scores[at] = scores.to(self.scores.dtype)

        self._walk("score", shard, batch_size, visit)
        found: Tensor = self.scores[: len(shard)].clone()
        return found

    def prepare(self, name: Hashable, shard: Shard, tell: Tell) -> None:
        """Ask `tell` about two images, to learn the names and shapes of its sums, and make room for them."""
        told = tell(*next(shard.batches(2)))
        self.totals[name] = {key: torch.zeros_like(tensor) for key, tensor in told.items()}

    def add_up(self, name: Hashable, shard: Shard, batch_size: int, tell: Tell) -> Tensors:
        """Return the sums of what is told of the batches of a shard, without graphs where it cannot be captured."""
        totals = self.totals[name]

        def visit(at: Tensor, images: Tensor, labels: Tensor) -> None:
            told = tell(images, labels)
            torch._foreach_add_(list(totals.values()), [told[key].detach() for key in totals])

        if name not in self.uncaptured:
            try:
                torch._foreach_zero_(list(totals.values()))
                self._walk(name, shard, batch_size, visit)
                return {key: tensor.clone() for key, tensor in totals.items()}
            except RuntimeError:  # something in it waits for the device, say, or the memory is full: never try again
                self.uncaptured.add(name)
        return add_up(tell(*batch) for batch in shard.batches(batch_size))

    def _walk(self, name: Hashable, shard: Shard, batch_size: int, visit: Visit) -> None:
        """Visit all images of a shard, batch by batch."""
        if len(shard) > len(self.rows):
            self._make_room(len(shard), self.labels.shape[1])
        self.stores[id(shard.store)] = shard.store
        self.rows[: len(shard)].copy_(shard.rows)
        self.labels[: len(shard)].copy_(shard.labels)
        self.cursor.zero_()
        for start, stop in batch_bounds(len(shard), batch_size):
            self.lane.do((name, stop - start, id(shard.store)), partial(self._step, stop - start, shard.store, visit))

    def _step(self, size: int, store: ImageStore, visit: Visit) -> None:
        """Visit the next batch."""
        at = self.cursor + self.offsets[:size]
        visit(at, store.gather(self.rows[at]), self.labels[at])
        self.cursor.add_(size)
