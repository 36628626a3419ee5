"""Squared gradients of convolutions against a loop over samples, by triton's interpreter; on a GPU: tests/gpu."""

import pytest
import squares_cases
import torch
from squares_cases import CASES, expected
from stem_cases import assert_within, interpret

from fednca import fisher
from fednca.engine import fuse, fused
from fednca.engine.kernels import squares

ACCUMULATION = 1e-6  # of sums in float32


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpret(tmp_path_factory.mktemp("interpreted") / "found.pt", squares_cases.__file__)


@pytest.mark.parametrize("name", CASES)
def test_squared_gradients_are_those_of_a_loop_over_samples(name, interpreted):
    found, (reference, sums) = interpreted[name], expected(CASES[name])
    assert found.dtype == torch.float32
    assert found.shape == reference.shape
    assert_within(found, reference, sums, ACCUMULATION, ACCUMULATION)


def test_squared_gradients_repeat_themselves(interpreted):
    torch.testing.assert_close(interpreted["again"], {name: interpreted[name] for name in CASES}, rtol=0, atol=0)


def test_the_fisher_diagonal_of_a_convolution_takes_them(interpreted):
    case = CASES["dilated"]
    reference, sums = expected(case)
    for found in (interpreted["layer"], interpreted["layer again"]):
        assert_within(found["weight"].permute(0, 2, 3, 1), reference, sums, ACCUMULATION, ACCUMULATION)
        by_hand = case.tensors()[2].sum(dim=(2, 3)).square().sum(0)
        torch.testing.assert_close(found["bias"].double(), by_hand, rtol=1e-5, atol=0)
    assert interpreted["used"] == [1, 3, 3]  # compiled once, for batches of any size


@pytest.mark.parametrize(
    ("channels", "columns", "found"),
    [
        (512, 4608, (True, 128)),
        (64, 576, (True, 64)),
        (96, 864, (False, 64)),
        (3, 147, (False, 64)),
        (2, 18, (False, 32)),
    ],
)
def test_columns_of_a_tile_share_a_tap_where_they_can(channels, columns, found):
    assert squares.columns_of_tile(channels, columns) == found
    shared, cols = found
    taps = [set(range(start, start + cols)) for start in range(0, columns, cols)]
    assert shared == all(len({column // channels for column in tile}) == 1 for tile in taps)


def test_what_a_gpu_cannot_compile_stays_torchs(monkeypatch):
    monkeypatch.setattr(fused, "DEVICE", "cpu")  # for which triton compiles nothing
    monkeypatch.setattr(fuse, "available", lambda: True)
    case = CASES["3x3, two apart"]
    x, g = case.given()
    assert fisher.squares_by_kernel(case.layer(), x, g) is None
    found = fisher.squares_of_convolution(case.layer(), x, g)["weight"].permute(0, 2, 3, 1)
    reference, _ = expected(case)
    torch.testing.assert_close(found.double(), reference, rtol=0.02, atol=0.02 * float(reference.mean()))


def test_other_types_and_devices_stay_torchs(monkeypatch):
    case = CASES["one channel"]
    x, g = case.given()
    monkeypatch.setattr(fuse, "compiles", lambda *_: True)
    assert fisher.squares_by_kernel(case.layer(), x, g) is None
    monkeypatch.setattr(fused, "DEVICE", "cpu")
    assert fisher.squares_by_kernel(case.layer(), x.float(), g.float()) is None
    monkeypatch.setattr(fused, "LARGEST", x.numel() - 1)
    assert fisher.squares_by_kernel(case.layer(), x, g) is None
