"""Kernels of a ResNet's first convolution against torch's in float64, by triton's interpreter; on a GPU: tests/gpu."""

import pytest
import timm
import torch
from stem_cases import CASES, assert_within, expected, interpret
from torch import nn

from fednca.kernels import layers

ROUNDING = {torch.float32: 0, torch.bfloat16: 2**-7}  # the interpreter cuts bits off, where a GPU rounds
ACCUMULATION = 1e-6  # of sums in float32


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpret(tmp_path_factory.mktemp("interpreted") / "found.pt")


@pytest.mark.parametrize("name", CASES)
def test_the_convolution_is_torchs(name, interpreted):
    found, (reference, sums) = interpreted[name]["y"], expected(CASES[name])
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_within(found, reference["y"], sums["y"], ROUNDING[torch.bfloat16], ACCUMULATION)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_the_weight_is_torchs(name, interpreted):
    case = CASES[name]
    found, (reference, sums) = interpreted[name]["weight"], expected(case)
    assert found.dtype == case.weight
    assert found.stride() == case.given()[1].stride()
    assert_within(found, reference["weight"], sums["weight"], ROUNDING[case.weight], ACCUMULATION)


def test_images_are_folded_into_blocks_with_a_border_of_zeros(interpreted):
    images, _, _ = CASES["one image"].given()
    folded = interpreted["folded"]
    blocks = torch.zeros_like(folded)
    for y in range(8):
        for x in range(12):
            first = y % 2 * 8 + x % 2 * 3
            blocks[0, y // 2 + 2, x // 2 + 2, first : first + 3] = images[0, :, y, x]
    assert folded.shape == (1, 4 + 3, 6 + 3, 16)
    torch.testing.assert_close(folded, blocks, rtol=0, atol=0)


def test_a_gradient_may_lie_otherwise_in_memory(interpreted):
    torch.testing.assert_close(interpreted["gradient in planes"], interpreted["one image"], rtol=0, atol=0)


def test_evaluation_is_the_same_convolution(interpreted):
    torch.testing.assert_close(interpreted["evaluation"], interpreted["one image"]["y"], rtol=0, atol=0)


# -- what the kernels take ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "densenet121"])
def test_the_first_convolution_of_a_network_fits(name):
    model = timm.create_model(name)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [module for module in convolutions if layers.fits_stem(module)] == convolutions[:1]


class Other(nn.Conv2d):
    """A convolution that may do something else."""


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.Conv2d(4, 64, 7, 2, 3, bias=False),
        nn.Conv2d(3, 64, 5, 2, 3, bias=False),
        nn.Conv2d(3, 64, (7, 5), 2, 3, bias=False),
        nn.Conv2d(3, 64, 7, (2, 1), 3, bias=False),
        nn.Conv2d(3, 64, 7, 2, 2, bias=False),
        nn.Conv2d(3, 64, 7, 1, "same", bias=False),
        nn.Conv2d(3, 64, 7, 2, 3, dilation=2, bias=False),
        nn.Conv2d(3, 63, 7, 2, 3, groups=3, bias=False),
        nn.Conv2d(3, 48, 7, 2, 3, groups=3, bias=False),
        nn.Conv2d(3, 64, 7, 2, 3, bias=False, padding_mode="reflect"),
        nn.Conv2d(3, 24, 7, 2, 3, bias=False),
        nn.Conv2d(3, 80, 7, 2, 3, bias=False),
        nn.ConvTranspose2d(3, 64, 7, 2, 3, bias=False),
        Other(3, 64, 7, 2, 3, bias=False),
    ],
    ids=str,
)
def test_other_modules_do_not_fit(module):
    assert not layers.fits_stem(module)


@pytest.mark.parametrize("channels", [16, 32, 48, 64])
def test_channels_in_steps_of_sixteen_fit(channels):
    assert layers.fits_stem(nn.Conv2d(3, channels, 7, 2, 3, bias=False))


def test_images_that_the_kernels_cannot_take_are_torchs(monkeypatch):
    images = torch.zeros(2, 3, 8, 12).to(memory_format=torch.channels_last)
    weight = torch.zeros(64, 3, 7, 7, dtype=torch.bfloat16)
    assert not layers.stem_usable(images, weight)
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    assert layers.stem_usable(images, weight)
    assert layers.stem_usable(images.bfloat16(), weight)
    assert not layers.stem_usable(images.half(), weight)
    assert not layers.stem_usable(images, weight.float())
    assert not layers.stem_usable(images, weight.to("meta"))
    assert not layers.stem_usable(images.contiguous(), weight)
    assert not layers.stem_usable(images[:0], weight)
    assert not layers.stem_usable(images[0], weight)
    assert not layers.stem_usable(images.clone().requires_grad_(), weight)
    odd = torch.zeros(2, 3, 7, 13).to(memory_format=torch.channels_last)
    assert not layers.stem_usable(odd[:, :, :6].contiguous(memory_format=torch.channels_last), weight)
    assert not layers.stem_usable(odd[:, :, :, :12].contiguous(memory_format=torch.channels_last), weight)
    assert not layers.stem_usable(torch.zeros(2, 4, 8, 12).to(memory_format=torch.channels_last), weight)
    shifted = torch.zeros(images.numel() + 1)[1:].view(2, 8, 12, 3).permute(0, 3, 1, 2)
    assert shifted.is_contiguous(memory_format=torch.channels_last)
    assert not layers.stem_usable(shifted, weight)


def test_numbers_are_counted_with_32_bits(monkeypatch):
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    images = torch.zeros(2, 3, 8, 12).to(memory_format=torch.channels_last)
    weight = torch.zeros(64, 3, 7, 7, dtype=torch.bfloat16)
    largest = 2 * (4 + 3) * (6 + 3) * 64  # with a border around the map
    monkeypatch.setattr(layers, "LARGEST", largest)
    assert layers.stem_usable(images, weight)
    monkeypatch.setattr(layers, "LARGEST", largest - 1)
    assert not layers.stem_usable(images, weight)
