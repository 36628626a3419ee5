"""Kernels of our own on a GPU against torch's operations in float64, at the sizes of a training."""

import copy

import pytest
import timm
import torch
from kernel_cases import NORMS, POOLS, Map, assert_near, norm, odd_values, outcome, train, with_kernels, with_ties
from torch import nn

from fednca.engine import fuse, kernels

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
SHAPES = [
    (32, 64, 112, 112),
    (32, 64, 56, 56),
    (31, 128, 28, 28),
    (32, 256, 14, 14),
    (32, 512, 7, 7),
    (37, 512, 2, 2),
    (9, 20, 61, 57),
    (320, 64, 56, 56),
]
REAL = [Map(shape, dtype) for shape in SHAPES for dtype in ROUNDING]


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def as_text(case):
    return f"{'x'.join(map(str, case.shape))}-{str(case.dtype).removeprefix('torch.')}"


def undecided_left_out(case, x, g):
    """Return the gradient without the values that are so near to zero that rounding decides what ReLU does."""
    return g * (copy.deepcopy(norm(case, "cuda"))(x).abs() > 1e-3) if case.relu else g


def test_kernels_are_available():
    assert fuse.available()


@pytest.mark.parametrize("case", [*REAL, *NORMS.values()], ids=as_text)
@pytest.mark.parametrize("small", [0, kernels.SMALL_PER_CHANNEL, 10**9], ids=["in splits", "as chosen", "at once"])
def test_batch_norm_is_torchs(case, small, monkeypatch):
    monkeypatch.setattr(kernels, "SMALL_PER_CHANNEL", small)
    monkeypatch.setattr(kernels, "SMALL", max(small, kernels.SMALL))
    x, g = case.tensors("cuda")
    g = undecided_left_out(case, x, g)
    expected = outcome(norm(case, "cuda"), x, g, nn.ReLU() if case.relu else None)
    module = with_kernels(norm(case, "cuda"), case, case.relu)
    again = copy.deepcopy(module)
    found = outcome(module, x.to(case.dtype), g.to(case.dtype))
    rough = 1e-3 if case.mean == 1000 else 0  # float32 knows numbers near 1000 to 6e-5
    assert_near(found, expected, max(ROUNDING[case.dtype], rough))
    exact = ("weight", "bias", "running_mean", "running_var")
    assert_near({key: found[key] for key in exact}, {key: expected[key] for key in exact}, max(3e-5, rough))
    repeated = outcome(again, x.to(case.dtype), g.to(case.dtype))
    torch.testing.assert_close(repeated, found, rtol=0, atol=0)


@pytest.mark.parametrize("case", [*REAL, *POOLS.values()], ids=as_text)
def test_max_pool_is_torchs(case):
    x, g = with_ties(case, "cuda")
    expected = outcome(nn.MaxPool2d(3, 2, 1), x, g)
    module = with_kernels(nn.MaxPool2d(3, 2, 1), case)
    found = outcome(module, x.to(case.dtype), g.to(case.dtype))
    assert torch.equal(found["y"].double(), expected["y"])
    assert_near(found, expected, ROUNDING[case.dtype])
    repeated = outcome(module, x.to(case.dtype), g.to(case.dtype))
    torch.testing.assert_close(repeated, found, rtol=0, atol=0)


def test_max_pool_treats_nan_and_infinity_as_torch_does_on_a_cpu():
    x, g = odd_values()
    expected = outcome(nn.MaxPool2d(3, 2, 1), x, g)
    x, g = (t.float().cuda().to(memory_format=torch.channels_last) for t in (x, g))
    found = outcome(with_kernels(nn.MaxPool2d(3, 2, 1), POOLS["odd"]), x, g)
    torch.testing.assert_close(found["y"].cpu().double(), expected["y"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found["x"].cpu().double(), expected["x"], rtol=1e-5, atol=1e-6)


def resnet(size):
    """Return a network and batches of several sizes."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=5).cuda().to(memory_format=torch.channels_last).train()
    batches = [torch.randn(n, 3, size, size, device="cuda") for n in (32, 32, 31, 2)]
    return model, [images.to(memory_format=torch.channels_last) for images in batches]


def fused(model, images):
    scratch = copy.deepcopy(model)
    return fuse.fuse(copy.deepcopy(model), fuse.watch(scratch, lambda: scratch(images)))


@pytest.mark.parametrize("size", [64, 224])
def test_a_captured_step_needs_no_compiler_and_replays_right_for_other_batches(size):
    model, batches = resnet(size)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        train(copy.deepcopy(model), batches[0])  # cuDNN's own start
        model = fused(model, batches[0])
        graphs = {}
        for images in batches[1:]:
            static, graph, mine = images.clone(), torch.cuda.CUDAGraph(), copy.deepcopy(model)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = train(mine, static)
            graphs[len(images)] = (static, graph, mine, made)
        for images in batches:
            static, graph, mine, made = graphs[len(images)]
            mine.load_state_dict(model.state_dict())
            static.copy_(images)
            graph.replay()
            torch.testing.assert_close(made, train(copy.deepcopy(model), images), rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_a_fused_network_is_as_near_to_float64_as_torchs(autocast):
    model, (images, *_) = resnet(64)
    true = train(copy.deepcopy(model).double(), images.double())
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
        plain = train(copy.deepcopy(model), images)
        ours = train(fused(model, images), images)

    def distance(made):
        apart = sum((made[name].double() - true[name]).square().sum() for name, _ in model.named_parameters())
        return float((apart / sum(true[name].square().sum() for name, _ in model.named_parameters())).sqrt())

    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in plain.items()}
    assert distance(ours) < 1.5 * distance(plain)
    assert_near({"y": ours["y"]}, {"y": true["y"]}, 0.1 if autocast else 1e-4)
