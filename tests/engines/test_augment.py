"""Augmentation against torchvision's affine, against flips by index and against arithmetic by hand."""

import math

import pytest
import torch
from torchvision.transforms.functional import InterpolationMode, affine

from fednca.base.randomness import torch_rng
from fednca.config import AugmentConfig
from fednca.engines.augment import augment, draw, move


def images(height=16, width=16, count=4):
    # smooth, so that two correct interpolations agree
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij")
    return (
        torch.stack([torch.stack([(y + k).sin(), (x * 2).cos(), y * x / 9]) for k in range(count)]).double() / 2 + 0.5
    )


@pytest.mark.parametrize(
    ("degrees", "scale", "shift"),
    [
        (0.0, 1.0, (0.25, 0.0)),
        (0.0, 1.0, (0.0, -0.125)),
        (0.0, 1.5, (0.0, 0.0)),
        (30.0, 1.0, (0.0, 0.0)),
        (-20.0, 0.8, (0.125, 0.25)),
    ],
)
def test_movements_are_torchvisions(degrees, scale, shift):
    before = images()
    after = move(
        before, torch.full((4,), degrees).double(), torch.full((4,), scale).double(), torch.tensor([shift] * 4).double()
    )
    translate = [round(16 * s) for s in shift]
    expected = affine(before, degrees, translate, scale, [0.0, 0.0], InterpolationMode.BILINEAR)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)


def test_rotation_keeps_shapes_in_images_that_are_not_square():
    before = torch.zeros(1, 1, 21, 41, dtype=torch.float64)
    before[0, 0, 10, 20:30] = 1  # ten pixels to the right of the centre
    after = move(before, torch.tensor([90.0]).double(), torch.ones(1).double(), torch.zeros(1, 2).double())
    assert after[0, 0, 11:20, 20].min() > 0.99  # clockwise: now below it
    assert after[0, 0, 10, 22:].max() < 1e-6


def test_flips_happen_to_half_of_the_images_and_nothing_else():
    before = torch.arange(2 * 3, dtype=torch.float64).view(1, 1, 2, 3).expand(4000, 3, 2, 3) / 6
    after = augment(before, draw(len(before), torch_rng(0, "x")).to(before), AugmentConfig(hflip=True))
    mirrored = (after == before.flip(-1)).flatten(1).all(1)
    assert torch.equal(after[~mirrored], before[~mirrored])
    assert abs(int(mirrored.sum()) - 2000) < 4 * math.sqrt(1000)  # four standard deviations
    upside_down = augment(before, draw(len(before), torch_rng(0, "x")).to(before), AugmentConfig(vflip=True))
    assert ((upside_down == before.flip(-2)) | (upside_down == before)).all()


def test_brightness_and_contrast_by_hand():
    before = images()
    bright = augment(before, draw(len(before), torch_rng(1, "x")).to(before), AugmentConfig(brightness=0.2))
    inner = (bright > 0) & (bright < 1)
    for b, a, unclipped in zip(before, bright, inner, strict=True):
        change = (a - b)[unclipped]
        assert change.max() - change.min() < 1e-9
        assert abs(float(change.mean())) <= 0.2
    strong = augment(before, draw(len(before), torch_rng(1, "x")).to(before), AugmentConfig(contrast=0.5))
    for b, a in zip(before, strong, strict=True):
        inside = (a > 0) & (a < 1)
        gain = ((a - b.mean()) / (b - b.mean()))[inside & ((b - b.mean()).abs() > 0.01)]
        assert gain.max() - gain.min() < 1e-6
        assert 0.5 <= float(gain.mean()) <= 1.5


def test_the_same_seed_gives_the_same_images_and_another_one_others():
    config = AugmentConfig(hflip=True, rotate=10, scale=0.1, shift=0.1, brightness=0.1, contrast=0.1)
    first, again, other = (
        augment(images(), draw(len(images()), torch_rng(seed, "x")).to(images()), config) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0 <= float(first.min()) <= float(first.max()) <= 1
