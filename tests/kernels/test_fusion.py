"""Which modules kernels of our own take the place of, and that a network is the same with and without them."""

import copy

import pytest
import timm
import torch
from kernel_cases import net, train
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from fednca.kernels import fusion, layers
from fednca.kernels.residual import FUSED


def planned(model, images, passes=1):
    scratch = copy.deepcopy(model).train()
    return fusion.watch(scratch, lambda: [scratch(images) for _ in range(passes)])


def test_resnets_pairs_are_the_first_ones_of_stem_and_blocks():
    model = timm.create_model("resnet18").to(memory_format=torch.channels_last)
    plan = planned(model, torch.randn(2, 3, 64, 64))
    blocks = [f"layer{layer}.{block}." for layer in (1, 2, 3, 4) for block in (0, 1)]
    assert plan.relus == {f"{path}bn1": f"{path}act1" for path in ["", *blocks]}
    assert plan.blocks == {f"{path}bn2": path.removesuffix(".") for path in blocks}
    assert len(plan.norms) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    assert plan.norms["layer4.1.bn2"] == fusion.Input(512, torch.float32)
    assert plan.pools == {"maxpool": fusion.Input(64, torch.float32)}


def bottlenecks(**options):
    return ResNet(Bottleneck, (1, 1, 1, 1), channels=(16, 16, 32, 32), num_classes=3, **options)


def basic_blocks():
    return timm.create_model("resnet18", num_classes=3)


@pytest.mark.parametrize("build", [basic_blocks, bottlenecks])
def test_a_fused_resnet_without_kernels_does_bit_by_bit_the_same(build):
    torch.manual_seed(0)
    model = build().to(memory_format=torch.channels_last).train()
    images = torch.randn(3, 3, 64, 64).to(memory_format=torch.channels_last)
    plan = planned(model, images)
    fused = fusion.accelerate(copy.deepcopy(model), plan)
    blocks = {path for path, module in model.named_modules() if isinstance(module, (BasicBlock, Bottleneck))}
    assert set(plan.blocks.values()) == blocks
    assert all(type(fused.get_submodule(path)) in FUSED.values() for path in blocks)
    assert list(fused.state_dict()) == list(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(train(fused, images), train(model, images), rtol=0, atol=0)
    torch.testing.assert_close(fused.eval()(images), model.eval()(images), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model(images), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"drop_path_rate": 0.5}, [1]),
        ({"drop_block_rate": 0.5}, [1, 2]),
        ({"aa_layer": nn.AvgPool2d}, [1]),
        ({"block_args": {"attn_layer": "se"}}, []),
        ({"act_layer": nn.SiLU}, []),
        ({"norm_layer": nn.InstanceNorm2d}, []),
    ],
    ids=str,
)
def test_a_block_with_further_parts_adds_its_shortcut_itself(options, layers):
    plan = planned(bottlenecks(**options), torch.randn(2, 3, 64, 64))
    assert plan.blocks == {f"layer{layer}.0.bn3": f"layer{layer}.0" for layer in layers}


def test_weights_and_buffers_stay_where_they_are():
    model, images = net()
    before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    fusion.accelerate(model, planned(model, images))
    assert isinstance(model.stem[1], layers.FusedBatchNorm2d)
    assert isinstance(model.stem[3], layers.FusedMaxPool2d)
    assert {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == before


def test_batches_may_be_counted_elsewhere():
    model, images = net()
    fused = fusion.accelerate(copy.deepcopy(model), planned(model, images))
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
    fused = fusion.accelerate(copy.deepcopy(model), plan)
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
    assert not layers.fits_norm(module)
    assert not layers.fits_pool(module)


def test_maps_that_the_kernels_cannot_take_are_torchs(monkeypatch):
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    x = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert layers.usable(x, torch.float32)
    assert not layers.usable(x, torch.bfloat16)
    assert not layers.usable(x.contiguous(), torch.float32)
    assert not layers.usable(x[:0], torch.float32)
    assert not layers.usable(x[:, :, :, 1:], torch.float32)
    shifted = torch.zeros(x.numel() + 1)[1:].view(2, 4, 4, 8).permute(0, 3, 1, 2)
    assert shifted.is_contiguous(memory_format=torch.channels_last)
    assert not layers.usable(shifted, torch.float32)
    monkeypatch.setattr(layers, "LARGEST", x.numel() - 1)
    assert not layers.usable(x, torch.float32)


def test_evaluation_keeps_what_a_gradient_needs():
    x, weighted, plain = torch.zeros(1, 3, 2, 2), nn.BatchNorm2d(3).eval(), nn.ReLU().eval()
    assert not layers.only_evaluated(weighted, x)
    assert not layers.only_evaluated(plain, x.clone().requires_grad_())
    assert layers.only_evaluated(plain, x)
    assert layers.only_evaluated(copy.deepcopy(weighted).requires_grad_(False), x)
    with torch.no_grad():
        assert layers.only_evaluated(weighted, x)
        assert not layers.only_evaluated(weighted.train(), x)


def test_one_value_per_channel_is_refused_as_torch_does():
    model = fusion.accelerate(
        nn.Sequential(nn.BatchNorm2d(3)), fusion.Plan({"0": fusion.Input(3, torch.float32)})
    ).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.zeros(1, 3, 1, 1))


def test_what_a_gpu_cannot_compile_stays_torchs(monkeypatch):
    monkeypatch.setattr(layers, "DEVICE", "cpu")  # for which triton compiles nothing
    model = timm.create_model("resnet18", num_classes=5).to(memory_format=torch.channels_last).train()
    maps, images = fusion.Input(64, torch.float32), fusion.Input(3, torch.float32)
    plan = fusion.Plan(norms={"bn1": maps}, pools={"maxpool": maps}, stems={"conv1": images}, relus={"bn1": "act1"})
    same = fusion.accelerate(copy.deepcopy(model), plan)
    assert [type(module) for module in same.modules()] == [type(module) for module in model.modules()]
