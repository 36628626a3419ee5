"""Kernels of a ResNet's first convolution on a GPU against torch's in float64, at the sizes of a training."""

import pytest
import torch
from stem_cases import CASES, Case, assert_within, expected, outcome

from fednca.kernels import layers, stem

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 0, torch.bfloat16: 2**-8}
ACCUMULATION = 2e-6  # of sums in float32, which tensor cores cut off instead of rounding
REAL = {
    "224 pixels": Case((32, 224, 224)),
    "224 pixels, many images": Case((64, 224, 224), weight=torch.float32),
    "224 pixels, bf16": Case((31, 224, 224), dtype=torch.bfloat16),
    "64 pixels": Case((32, 64, 64), weight=torch.float32),
    "64 pixels, many images": Case((320, 64, 64), planes=True),
    "not square": Case((7, 226, 130), 32, weight=torch.float32),
    "wide": Case((1, 62, 1022), 48, torch.bfloat16, torch.float32),
    "28 pixels": Case((2, 28, 28), 16),
}
KERNELS = [stem._fold, stem._convolve, stem._correlate, stem._join]


def outcome_over_nan(*given):
    """Return what the kernels make where memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return outcome(*given)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_is_torchs(found, case):
    reference, sums = expected(case, "cuda")
    assert {name: tensor.dtype for name, tensor in found.items()} == {"y": torch.bfloat16, "weight": case.weight}
    assert found["y"].is_contiguous(memory_format=torch.channels_last)
    assert found["weight"].stride() == case.given("cuda")[1].stride()
    for name, tensor in found.items():
        assert_within(tensor, reference[name], sums[name], ROUNDING[tensor.dtype], ACCUMULATION)


@pytest.mark.parametrize("name", [*REAL, *CASES])
def test_convolution_and_gradient_are_torchs_and_repeat_themselves(name):
    case = (CASES | REAL)[name]
    found = outcome_over_nan(*case.given("cuda"))
    assert_is_torchs(found, case)
    torch.testing.assert_close(outcome(*case.given("cuda")), found, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("splits", [8, 37, 1000])
def test_the_gradient_does_not_depend_on_how_it_is_cut(rows, splits, monkeypatch):
    monkeypatch.setattr(stem, "BACKWARD_ROWS", rows)
    monkeypatch.setattr(stem, "SPLITS", splits)
    case = REAL["not square"]
    assert_is_torchs(outcome_over_nan(*case.given("cuda")), case)


def test_images_are_rounded_as_torch_rounds_them():
    _, weight, g = REAL["64 pixels, many images"].given("cuda")
    rng = torch.Generator("cuda").manual_seed(1)
    images = torch.randn(320, 3, 64, 64, generator=rng, device="cuda").to(memory_format=torch.channels_last)
    assert not torch.equal(images.bfloat16().float(), images)
    found, rounded = outcome(images, weight, g), outcome(images.bfloat16(), weight, g)
    torch.testing.assert_close(found, rounded, rtol=0, atol=0)


def test_evaluation_is_the_same_convolution():
    images, weight, g = REAL["64 pixels, many images"].given("cuda")
    assert layers.stem_usable(images, weight)
    with torch.inference_mode():
        found = stem.StemConv.apply(images, weight)
    assert torch.equal(found, outcome(images, weight, g)["y"])


@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_a_captured_step_needs_no_compiler_and_replays_right_for_other_batches(size, dtype, monkeypatch):
    stem.warm_up(64, dtype, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "compile", None)  # whoever calls it fails
    for count in (32, 31, 2, 1):
        images, weight, g = Case((count, size, size), dtype=dtype).given("cuda")
        static = [torch.zeros_like(tensor) for tensor in (images, weight, g)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = outcome(*static)
        for sign in (1, -1):
            for place, tensor in zip(static, (images * sign, weight, g.flip(0)), strict=True):
                place.copy_(tensor)
            graph.replay()
            expected_now = outcome(images * sign, weight, g.flip(0).contiguous(memory_format=torch.channels_last))
            torch.testing.assert_close(made, expected_now, rtol=0, atol=0)
