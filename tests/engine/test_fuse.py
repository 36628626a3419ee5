"""Kernels of our own against torch's operations in float64, by triton's interpreter; on a GPU: tests/gpu."""

import copy

import pytest
import timm
import torch
from kernel_cases import NORMS, POOLS, assert_near, interpret, net, norm, odd_values, outcome, train, with_ties
from torch import nn

from fednca.engine import fuse

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


def test_a_network_with_kernels_is_the_network(interpreted):
    model, images = net()
    assert {"BatchNormBackward", "MaxPoolBackward"} <= interpreted["net", "operations"]
    assert "NativeBatchNormBackward0" not in interpreted["net", "operations"]
    assert_near(interpreted["net", "step"], train(model.double(), images.double()), 1e-4)


# -- which modules are fused -------------------------------------------------------------------------------------------


def planned(model, images, passes=1):
    scratch = copy.deepcopy(model).train()
    return fuse.watch(scratch, lambda: [scratch(images) for _ in range(passes)])


def test_resnets_pairs_are_the_first_ones_of_stem_and_blocks():
    model = timm.create_model("resnet18").to(memory_format=torch.channels_last)
    plan = planned(model, torch.randn(2, 3, 64, 64))
    blocks = [f"layer{layer}.{block}." for layer in (1, 2, 3, 4) for block in (0, 1)]
    assert plan.relus == {f"{path}bn1": f"{path}act1" for path in ["", *blocks]}
    assert len(plan.norms) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    assert plan.norms["layer4.1.bn2"] == fuse.Input(512, torch.float32)
    assert plan.pools == {"maxpool": fuse.Input(64, torch.float32)}


def test_a_fused_resnet_without_kernels_does_bit_by_bit_the_same():
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=3).to(memory_format=torch.channels_last).train()
    images = torch.randn(3, 3, 64, 64).to(memory_format=torch.channels_last)
    fused = fuse.fuse(copy.deepcopy(model), planned(model, images))
    assert list(fused.state_dict()) == list(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(train(fused, images), train(model, images), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(fused).eval()(images), model.eval()(images), rtol=0, atol=0)


def test_weights_and_buffers_stay_where_they_are():
    model, images = net()
    before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    fuse.fuse(model, planned(model, images))
    assert isinstance(model.stem[1], fuse.FusedBatchNorm2d)
    assert isinstance(model.stem[3], fuse.FusedMaxPool2d)
    assert {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == before


def test_batches_may_be_counted_elsewhere():
    model, images = net()
    fused = fuse.fuse(copy.deepcopy(model), planned(model, images))
    fused.stem[1].num_batches_tracked = None
    found, expected = train(fused, images), train(model, images)
    del expected["stem.1.num_batches_tracked"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Between(nn.Module):
    """Does something between a BatchNorm and a ReLU, and something after it."""

    def __init__(self, between, relu=None):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), relu or nn.ReLU(inplace=True)
        self.between = between

    def forward(self, x):
        x = self.bn(self.conv(x))
        x, further = self.between(x)
        return self.relu(x) + further


def add_in_place(x):
    x += 1
    return x, 0


class Twice(nn.Module):
    """One ReLU behind two BatchNorms."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.relu = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.two(self.relu(self.one(x))))


class Shared(nn.Module):
    """One BatchNorm before two ReLUs, and once before none."""

    def __init__(self):
        super().__init__()
        self.bn, self.relu, self.other = nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.bn(self.other(self.bn(self.relu(self.bn(x)))))


NETS = {
    "directly behind": (Between(lambda x: (x, 0)), {"bn": "relu"}),
    "the value is changed in place": (Between(add_in_place), {}),
    "the value is used before": (Between(lambda x: (x, x.mean())), {}),
    "a view of the value is used": (Between(lambda x: (x, x[:1].sum())), {}),
    "the value is kept": (Between(lambda x: (x, 0), nn.ReLU()), {}),
    "another activation": (Between(lambda x: (x, 0), nn.ReLU6(inplace=True)), {}),
    "behind two": (Twice(), {}),
    "before two": (Shared(), {}),
}


@pytest.mark.parametrize("name", NETS)
def test_only_a_relu_that_sees_nothing_else_is_joined(name):
    model, pairs = NETS[name]
    model.train()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plan = planned(model, images, passes=2)
    assert plan.relus == pairs
    assert plan.norms
    fused = fuse.fuse(copy.deepcopy(model), plan)
    torch.testing.assert_close(train(fused, images), train(copy.deepcopy(model), images), rtol=0, atol=0)


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, dtype=torch.float64),
        nn.SyncBatchNorm(3),
        nn.MaxPool2d(2, 2, 1),
        nn.MaxPool2d(3, 1, 1),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 2, 1, dilation=2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(3, (2, 1), 1),
        nn.MaxPool2d(3, 2, 1, return_indices=True),
    ],
    ids=str,
)
def test_other_modules_are_left_alone(module):
    assert not fuse.fits_norm(module)
    assert not fuse.fits_pool(module)


def test_maps_that_the_kernels_cannot_take_are_torchs(monkeypatch):
    monkeypatch.setattr(fuse, "DEVICE", "cpu")
    x = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert fuse.usable(x, torch.float32)
    assert not fuse.usable(x, torch.bfloat16)
    assert not fuse.usable(x.contiguous(), torch.float32)
    assert not fuse.usable(x[:0], torch.float32)
    assert not fuse.usable(x[:, :, :, 1:], torch.float32)
    shifted = torch.zeros(x.numel() + 1)[1:].view(2, 4, 4, 8).permute(0, 3, 1, 2)
    assert shifted.is_contiguous(memory_format=torch.channels_last)
    assert not fuse.usable(shifted, torch.float32)
    monkeypatch.setattr(fuse, "LARGEST", x.numel() - 1)
    assert not fuse.usable(x, torch.float32)


def test_one_value_per_channel_is_refused_as_torch_does():
    model = fuse.fuse(nn.Sequential(nn.BatchNorm2d(3)), fuse.Plan({"0": fuse.Input(3, torch.float32)})).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.zeros(1, 3, 1, 1))
