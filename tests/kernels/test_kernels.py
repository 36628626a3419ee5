"""Kernels of our own against torch's operations in float64, by triton's interpreter; on a GPU: tests/gpu."""

import pytest
import torch
from kernel_cases import (
    EVALUATED,
    NORMS,
    POOLED_IN_EVALUATION,
    POOLS,
    SUMS,
    Sum,
    assert_near,
    interpret,
    net,
    norm,
    norm_in_evaluation,
    odd_values,
    outcome,
    train,
    with_ties,
)
from torch import nn

from fednca.kernels.fusion import works

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bits off, where a GPU rounds


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpret(tmp_path_factory.mktemp("interpreted") / "found.pt")


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_is_torchs(name, interpreted):
    case = NORMS[name]
    expected = outcome(norm(case), *case.tensors(), nn.ReLU() if case.relu else None)
    found = interpreted["norm", name]
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        "y": case.dtype, "x": case.dtype, "weight": torch.float32, "bias": torch.float32,
        "running_mean": torch.float32, "running_var": torch.float32, "num_batches_tracked": torch.int64,
    }  # fmt: skip
    rough = 1e-3 if case.mean == 1000 else 0  # float32 knows numbers near 1000 to 6e-5
    assert_near(found, expected, max(ROUNDING[case.dtype], rough))
    exact = ("weight", "bias", "running_mean", "running_var")  # from sums in float32, whatever the map's type
    assert_near({key: found[key] for key in exact}, {key: expected[key] for key in exact}, max(1e-5, rough))


def test_variance_far_from_zero_is_as_good_as_torchs(interpreted):
    for name in ("far from zero", "at once, far from zero"):
        case = NORMS[name]
        x, _ = case.tensors()
        true = 0.7 * norm(case).running_var + 0.3 * x.transpose(0, 1).flatten(1).var(1)
        torch.testing.assert_close(interpreted["norm", name]["running_var"].double(), true, rtol=0, atol=5e-5)
        careless = x.float().square().mean((0, 2, 3)) - x.float().mean((0, 2, 3)).square()
        assert (careless - x.var((0, 2, 3))).abs().max() > 1e-2


@pytest.mark.parametrize("name", EVALUATED)
def test_batch_norm_in_evaluation_is_torchs(name, interpreted):
    case = EVALUATED[name]
    with torch.no_grad():
        y = norm_in_evaluation(case)(case.tensors()[0])
    found = interpreted["norm in evaluation", name]
    assert found.dtype == case.dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_near({"y": found}, {"y": y.relu() if case.relu else y}, ROUNDING[case.dtype])


@pytest.mark.parametrize("name", SUMS)
def test_batch_norm_with_a_shortcut_is_torchs(name, interpreted):
    case = NORMS[name]
    x, g = case.tensors()
    rounding = 2 * ROUNDING[case.dtype]  # of two gradients
    assert_near(interpreted["sum", name], outcome(Sum(norm(case)), x, g), rounding)
    with torch.no_grad():
        expected = Sum(norm_in_evaluation(case))(x)
    assert_near({"y": interpreted["sum in evaluation", name]}, {"y": expected}, rounding)


@pytest.mark.parametrize("name", POOLS)
def test_max_pool_is_torchs(name, interpreted):
    case = POOLS[name]
    expected = outcome(nn.MaxPool2d(3, 2, 1), *with_ties(case))
    found = interpreted["pool", name]
    assert found["y"].dtype == found["x"].dtype == case.dtype
    assert torch.equal(found["y"].double(), expected["y"])
    assert_near(found, expected, ROUNDING[case.dtype])


def test_max_pool_treats_nan_and_infinity_as_torch_does(interpreted):
    expected = outcome(nn.MaxPool2d(3, 2, 1), *odd_values())
    found = interpreted["pool", "odd values"]
    torch.testing.assert_close(found["y"].double(), expected["y"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found["x"].double(), expected["x"], rtol=1e-5, atol=1e-6)
    evaluated = interpreted["pool in evaluation", "odd values"]
    torch.testing.assert_close(evaluated.double(), expected["y"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", POOLED_IN_EVALUATION)
def test_max_pool_in_evaluation_is_torchs(name, interpreted):
    case = POOLS[name]
    x, _ = with_ties(case)
    found = interpreted["pool in evaluation", name]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, nn.MaxPool2d(3, 2, 1)(x[:1]).to(case.dtype))


def test_a_network_with_kernels_is_the_network(interpreted):
    model, images = net()
    assert {"BatchNormBackward", "MaxPoolBackward"} <= interpreted["net", "operations"]
    assert "NativeBatchNormBackward0" not in interpreted["net", "operations"]
    assert_near(interpreted["net", "step"], train(model.double(), images.double()), 1e-4)
    scores = model.eval()(images[:1].double()).detach()
    assert_near({"scores": interpreted["net", "scores"]}, {"scores": scores}, 1e-4)


class Stream:
    """A stream whose work ends well or not."""

    def __init__(self, failure=None):
        self.failure, self.waits = failure, 0

    def synchronize(self):
        self.waits += 1
        if self.failure:
            raise self.failure


def test_kernels_are_tried_out_without_waiting_for_what_others_capture(monkeypatch):
    def refuse(device=None):
        raise RuntimeError("operation not permitted when stream is capturing")

    good, bad = Stream(), Stream(RuntimeError("no kernel image is available"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    for stream, fine in ((good, True), (bad, False)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None, stream=stream: stream)
        assert works(lambda: None) is fine
        assert stream.waits == 1
