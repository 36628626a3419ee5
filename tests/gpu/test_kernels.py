"""Kernels of our own on a GPU against torch's operations in float64, at the sizes of training and evaluation."""

import copy

import pytest
import timm
import torch
from kernel_cases import (
    EVALUATED,
    NORMS,
    POOLS,
    Map,
    Sum,
    assert_near,
    no_operations_of_torch,
    norm,
    norm_in_evaluation,
    odd_values,
    outcome,
    train,
    with_kernels,
    with_ties,
)
from torch import nn

from fednca.kernels import fusion, norms

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
    assert fusion.available()


@pytest.mark.parametrize("case", [*REAL, *NORMS.values()], ids=as_text)
@pytest.mark.parametrize("small", [0, norms.SMALL_PER_CHANNEL, 10**9], ids=["in splits", "as chosen", "at once"])
def test_batch_norm_is_torchs(case, small, monkeypatch):
    monkeypatch.setattr(norms, "SMALL_PER_CHANNEL", small)
    monkeypatch.setattr(norms, "SMALL", max(small, norms.SMALL))
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


@pytest.mark.parametrize("case", [*REAL, *EVALUATED.values()], ids=as_text)
def test_batch_norm_in_evaluation_is_torchs(case):
    x, _ = case.tensors("cuda")
    module = norm_in_evaluation(case, "cuda")
    with torch.no_grad():
        expected = module(x).relu() if case.relu else module(x)
    with no_operations_of_torch():
        found = with_kernels(module, case, case.relu)(x.to(case.dtype))
    assert found.dtype == case.dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_near({"y": found}, {"y": expected}, ROUNDING[case.dtype])


@pytest.mark.parametrize("case", REAL, ids=as_text)
def test_batch_norm_with_a_shortcut_is_torchs(case):
    x, g = case.tensors("cuda")
    with torch.no_grad():
        g *= (norm(case, "cuda")(x) + x.flip(0)).abs() > 1e-3  # rounding decides what ReLU does with the others
    expected = outcome(Sum(norm(case, "cuda")), x, g)
    module = Sum(with_kernels(norm(case, "cuda"), case, relu=True))
    again = copy.deepcopy(module)
    found = outcome(module, x.to(case.dtype), g.to(case.dtype))
    assert_near(found, expected, 2 * ROUNDING[case.dtype])
    torch.testing.assert_close(outcome(again, x.to(case.dtype), g.to(case.dtype)), found, rtol=0, atol=0)


@pytest.mark.parametrize("case", REAL, ids=as_text)
def test_batch_norm_with_a_shortcut_in_evaluation_is_torchs(case):
    x, _ = case.tensors("cuda")
    module = norm_in_evaluation(case, "cuda")
    with torch.no_grad():
        expected = Sum(module)(x)
    with no_operations_of_torch():
        found = Sum(with_kernels(module, case, relu=True))(x.to(case.dtype))
    assert_near({"y": found}, {"y": expected}, ROUNDING[case.dtype])


@pytest.mark.parametrize("case", [*REAL, *POOLS.values()], ids=as_text)
def test_max_pool_in_evaluation_is_torchs(case):
    x, _ = with_ties(case, "cuda")
    with no_operations_of_torch():
        found = with_kernels(nn.MaxPool2d(3, 2, 1), case).eval()(x.to(case.dtype))
    assert torch.equal(found, nn.MaxPool2d(3, 2, 1)(x).to(case.dtype))


def test_max_pool_treats_nan_and_infinity_as_torch_does_on_a_cpu():
    x, g = odd_values()
    expected = outcome(nn.MaxPool2d(3, 2, 1), x, g)
    x, g = (t.float().cuda().to(memory_format=torch.channels_last) for t in (x, g))
    found = outcome(with_kernels(nn.MaxPool2d(3, 2, 1), POOLS["odd"]), x, g)
    torch.testing.assert_close(found["y"].cpu().double(), expected["y"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found["x"].cpu().double(), expected["x"], rtol=1e-5, atol=1e-6)
    with no_operations_of_torch():
        evaluated = with_kernels(nn.MaxPool2d(3, 2, 1), POOLS["odd"]).eval()(x)
    torch.testing.assert_close(evaluated.cpu().double(), expected["y"], rtol=0, atol=0, equal_nan=True)


def resnet(size):
    """Return a network and batches of several sizes."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=5).cuda().to(memory_format=torch.channels_last).train()
    batches = [torch.randn(n, 3, size, size, device="cuda") for n in (32, 32, 31, 2)]
    return model, [images.to(memory_format=torch.channels_last) for images in batches]


def fused_copy(model, images):
    scratch = copy.deepcopy(model)
    return fusion.accelerate(copy.deepcopy(model), fusion.watch(scratch, lambda: scratch(images)))


@pytest.mark.parametrize("size", [64, 224])
def test_a_captured_step_needs_no_compiler_and_replays_right_for_other_batches(size):
    model, batches = resnet(size)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        train(copy.deepcopy(model), batches[0])  # cuDNN's own start
        model = fused_copy(model, batches[0])
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
        ours = train(fused_copy(model, images), images)

    def distance(made):
        apart = sum((made[name].double() - true[name]).square().sum() for name, _ in model.named_parameters())
        return float((apart / sum(true[name].square().sum() for name, _ in model.named_parameters())).sqrt())

    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in plain.items()}
    assert distance(ours) < 1.5 * distance(plain)
    assert_near({"y": ours["y"]}, {"y": true["y"]}, 0.1 if autocast else 1e-4)


def test_a_captured_evaluation_needs_no_compiler_and_replays_right_for_other_batches():
    model, batches = resnet(64)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), torch.no_grad():
        copy.deepcopy(model).eval()(batches[0])  # cuDNN's own start
        judge = fused_copy(model, batches[0]).eval()
        with no_operations_of_torch():
            for images in batches[1:]:
                static, graph = torch.zeros_like(images), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    scores = judge(static)
                static.copy_(images)
                graph.replay()
                torch.testing.assert_close(scores, judge(images), rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_a_fused_network_evaluates_as_near_to_float64_as_torchs(autocast):
    model, batches = resnet(64)
    with torch.no_grad():
        for images in batches:
            model(images)  # moves the running statistics
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            ours = fused_copy(model, batches[0]).eval()
            plain = model.eval()(batches[0])
            with no_operations_of_torch():
                found = ours(batches[0])
        true = model.double()(batches[0].double())
    assert found.dtype == plain.dtype
    assert (found - true).norm() < 2 * (plain - true).norm()
    assert_near({"y": found}, {"y": true}, 0.1 if autocast else 1e-4)
