"""AdamW in one kernel for a slot of a GPU: where it can take torch's place, and how gradients get to it.

Torch's AdamW on one vector of weights needs the gradients in one vector too. So each is copied there first, and the
bf16 weights of the next forward pass are cast afterwards. This kernel reads each gradient where autograd left it, by a
table of addresses, and writes the bf16 weights as it goes.
"""

from itertools import cycle

import torch
from torch import Tensor

from fednca.engines.graphs.lanes import GRAPHS_KEPT
from fednca.engines.optimizer import Gradients, VectorOptimizer
from fednca.kernels import ALIGNMENT, DEVICE, DTYPES, available, works


class OneKernel:
    """Moves a slot's weights along their gradients, and renews the bf16 copies of the weights on the way."""

    def __init__(self, optimizer: VectorOptimizer, copies: Tensor) -> None:
        """Take torch's AdamW with its state, and the copies in one vector, laid out as the optimiser's."""
        from fednca.kernels import AdamW

        self.optimizer, self.copies, self.places = optimizer, copies, optimizer.gradients.views
        ((_, lengths),) = optimizer.gradients.layout.lengths.items()
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        device, options = optimizer.vector.device, optimizer.optimizer.param_groups[0]
        self.kernels = AdamW(
            list(zip(starts[:-1:2], lengths[::2], strict=True)),
            device,
            **{name: options[name] for name in ("lr", "betas", "eps", "weight_decay")},
        )
        # A captured step reads its gradients' addresses whenever it is replayed, so each graph needs a row of its own.
        # A lane keeps GRAPHS_KEPT graphs; it waits for the oldest and drops it before that one's row is reused.
        rows = torch.zeros(GRAPHS_KEPT + 1, len(self.places), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.rows = cycle(rows)

    def step(self, found: Gradients) -> None:
        """Move the weights; one without a gradient decays as with zero."""
        from fednca.kernels import address_of

        mine = [at_hand(*pair) for pair in zip(found, self.places, strict=True)]
        addresses = torch.tensor([address_of(each) for each in mine])
        if self.copies.is_cuda and torch.cuda.is_current_stream_capturing():
            # The gradients lie at the same addresses in each replay as now, and only now does Python know them. It puts
            # them into a row of pinned memory, which the GPU can read.
            given = next(self.rows).copy_(addresses)
        else:
            given = addresses.to(self.copies.device)
        optimizer = self.optimizer
        self.kernels.step(given, optimizer.vector.detach(), self.copies, optimizer.state)


def in_one_kernel(optimizer: VectorOptimizer, copies: Tensor | None) -> OneKernel | None:
    """Return what moves weights that have bf16 copies in one kernel, or nothing where that is left to torch."""

    def compile_kernels() -> None:
        from fednca.kernels import warm_up_adamw

        warm_up_adamw(len(optimizer.gradients), optimizer.vector.device)

    if copies is None or not fits(optimizer) or not works(compile_kernels):
        return None
    return OneKernel(optimizer, copies)


def fits(optimizer: VectorOptimizer) -> bool:
    """Return whether an optimiser does what the kernel does, where the kernel can do it."""
    return (
        isinstance(optimizer.optimizer, torch.optim.AdamW)
        and not optimizer.clip_norm
        and optimizer.vector.dtype == torch.float32
        and optimizer.vector.device.type == DEVICE
        and available()
    )


def at_hand(gradient: Tensor | None, place: Tensor) -> Tensor | None:
    """Return a gradient as the kernel can read it: as it is, or copied to its place."""
    return gradient if gradient is None or readable(gradient, place) else place.copy_(gradient)


def readable(gradient: Tensor, place: Tensor) -> bool:
    """Return whether the kernel can read a gradient: one that lies in memory as it would at its place."""
    strides = zip(gradient.shape, gradient.stride(), place.stride(), strict=True)
    return (
        gradient.device == place.device
        and gradient.dtype in DTYPES
        and gradient.data_ptr() % ALIGNMENT == 0
        and all(own == wanted for size, own, wanted in strides if size > 1)
    )
