"""Random changes of a batch on its device, by random numbers from the CPU."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fednca.config import AugmentConfig


def draw(samples: int, rng: torch.Generator) -> Tensor:
    """Draw the random numbers (B, 8) that decide how a batch is changed."""
    return torch.rand(samples, 8, generator=rng, dtype=torch.float64)


def augment(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Flip, move and recolour images (B, 3, H, W) in [0, 1], each by its own random numbers; new borders are black."""
    signs = 2 * draws - 1  # uniform in [-1, 1]
    if config.hflip:
        images = torch.where(draws[:, 0, None, None, None] < 0.5, images.flip(-1), images)
    if config.vflip:
        images = torch.where(draws[:, 1, None, None, None] < 0.5, images.flip(-2), images)
    if config.rotate or config.scale or config.shift:
        images = move(images, signs[:, 2] * config.rotate, 1 + signs[:, 3] * config.scale, signs[:, 4:6] * config.shift)
    if config.brightness or config.contrast:
        gain = 1 + signs[:, 6, None, None, None] * config.contrast
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        shift = signs[:, 7, None, None, None] * config.brightness
        images = ((images - mean) * gain + mean + shift).clamp(0, 1)
    return images


def move(images: Tensor, degrees: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Rotate clockwise, enlarge and shift images about their centre, in one bilinear sampling.

    degrees, scale: (B,); shift: (B, 2), to the right and down, as shares of the side.
    """
    height, width = images.shape[-2:]
    angle = degrees * (math.pi / 180)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    # affine_grid maps output to input positions: the inverse of the movement, in units of half a side
    aspect = height / width
    inverse = torch.stack([cos, sin * aspect, -sin / aspect, cos], dim=1).view(-1, 2, 2)
    offset = -(inverse @ (2 * shift)[:, :, None])
    grid = F.affine_grid(torch.cat([inverse, offset], dim=2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
