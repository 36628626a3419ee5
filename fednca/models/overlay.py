"""Evidence drawn over a picture: from nothing over violet and orange to yellow, the strongest."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

STRONGEST = 0.75  # how much of the picture the strongest evidence covers
# Steps of matplotlib's `inferno`; its lightness grows evenly, so it can be read without colour vision.
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
COLOURS = ((0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))


def overlay(picture: NDArray[np.uint8], heat: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Draw heat (h, w) in [0, 1] over a picture (H, W, 3)."""
    height, width = picture.shape[:2]
    fitted = np.asarray(Image.fromarray(heat).resize((width, height), Image.Resampling.BILINEAR)).clip(0, 1)
    colours = np.stack([np.interp(fitted, STEPS, channel) for channel in zip(*COLOURS, strict=True)], axis=-1)
    share = STRONGEST * fitted[..., None]
    mixed: NDArray[np.float64] = np.rint((1 - share) * picture + share * colours)
    return mixed.astype(np.uint8)


def shrink(picture: NDArray[np.uint8], longest: int = 1024) -> NDArray[np.uint8]:
    """Shrink a picture to at most this many pixels on its longer side."""
    image = Image.fromarray(picture)
    image.thumbnail((longest, longest), Image.Resampling.BILINEAR)
    return np.array(image)
