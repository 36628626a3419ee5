"""Modules whose work our kernels do where they can, and torch does elsewhere.

Each is a class that a module of torch is turned into (see `fuse`). It decides in every forward pass which of the two it
is: the same model may be given another type, or a map with another layout in memory, that no kernel was compiled for.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = "cuda"  # whose tensors the kernels take
DTYPES = {torch.bfloat16, torch.float32}
LARGEST = 2**31 - 1  # elements of a map, which the kernels count with 32 bits
ALIGNMENT = 16  # bytes, as the kernels were compiled for: they read 16 at once


class FusedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d, and what was behind it: a shortcut's sum, a ReLU."""

    running_mean: Tensor
    running_var: Tensor
    relu: bool
    dtype: torch.dtype  # for which the kernels were compiled

    def forward(self, input: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalise maps (N, C, H, W)."""
        fits = usable(input, self.dtype) and input.shape[1] == self.num_features
        if shortcut is not None:
            fits = fits and usable(shortcut, self.dtype) and shortcut.shape == input.shape
        own = (self.weight, self.bias, [self.running_mean, self.running_var])
        if fits and self.training and input.numel() > self.num_features:
            from fednca.kernels.norms import BatchNorm

            if self.num_batches_tracked is not None:  # a slot counts for all its BatchNorms at once
                self.num_batches_tracked.add_(1)
            found: Tensor = BatchNorm.apply(input, *own, self.momentum, self.eps, self.relu, shortcut)
            return found
        if fits and only_evaluated(self, input, shortcut):
            from fednca.kernels.inference import normalise

            return normalise(input, *own, self.eps, self.relu, shortcut)
        normal = super().forward(input)
        if shortcut is not None:
            normal += shortcut
        return F.relu(normal, inplace=True) if self.relu else normal


class FusedMaxPool2d(nn.MaxPool2d):
    """MaxPool2d(3, 2, 1)."""

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the maxima of windows of maps (N, C, H, W)."""
        if self.training and usable(input, self.dtype):
            from fednca.kernels.pooling import MaxPool

            found: Tensor = MaxPool.apply(input)
            return found
        if only_evaluated(self, input) and usable(input, self.dtype):
            from fednca.kernels.pooling import maxima

            return maxima(input)
        pooled: Tensor = super().forward(input)
        return pooled


class FusedStem(nn.Conv2d):
    """A ResNet's first convolution."""

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the map of images (N, 3, H, W)."""
        if input.dtype == self.dtype and stem_usable(input, self.weight):
            from fednca.kernels.stem import StemConv

            found: Tensor = StemConv.apply(input, self.weight)
            return found
        return super().forward(input)


# -- what the kernels can take -----------------------------------------------------------------------------------------


def fits_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm that the kernels can do."""
    return (
        type(module) is nn.BatchNorm2d
        and module.affine
        and module.track_running_stats
        and module.momentum is not None
        and module.weight.dtype == torch.float32
    )


def fits_pool(module: nn.Module) -> bool:
    """Return whether a module is the max pool that the kernels can do."""
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
        return False
    shape = (module.kernel_size, module.stride, module.padding, module.dilation)
    return [pair if isinstance(pair, tuple) else (pair, pair) for pair in shape] == [(3, 3), (2, 2), (1, 1), (1, 1)]


def fits_stem(module: nn.Module) -> bool:
    """Return whether a module is the convolution that the kernels can do."""
    return (
        type(module) is nn.Conv2d
        and (module.in_channels, module.kernel_size, module.stride) == (3, (7, 7), (2, 2))
        and (module.padding, module.dilation, module.groups) == ((3, 3), (1, 1), 1)
        and module.padding_mode == "zeros"
        and module.bias is None
        and module.out_channels % 16 == 0
        and module.out_channels <= 64
    )


def usable(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernels compiled for a type can take a map as it lies in memory."""
    return (
        x.device.type == DEVICE
        and x.dtype == dtype
        and x.ndim == 4
        and 0 < x.numel() <= LARGEST
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.data_ptr() % ALIGNMENT == 0
    )


def only_evaluated(module: nn.Module, *inputs: Tensor | None) -> bool:
    """Return whether a module is not in training, and no gradient of what it makes of its inputs will be asked for."""
    sources = (*inputs, *module.parameters())
    wanted = torch.is_grad_enabled() and any(source is not None and source.requires_grad for source in sources)
    return not (module.training or wanted)


def stem_usable(images: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels can take images and a weight as they are."""
    if images.device.type != DEVICE or images.ndim != 4 or images.numel() == 0:
        return False
    count, channels, height, width = images.shape
    pixels = count * (height // 2 + 3) * (width // 2 + 3)
    return (
        weight.device == images.device
        and weight.dtype == torch.bfloat16
        and images.dtype in DTYPES
        and not images.requires_grad
        and channels == 3
        and height % 2 == width % 2 == 0
        and max(images.numel(), pixels * max(16, len(weight))) <= LARGEST
        and images.is_contiguous(memory_format=torch.channels_last)
        and images.data_ptr() % ALIGNMENT == 0
    )
