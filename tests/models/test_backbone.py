import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from fednca.errors import FedncaError
from fednca.models.backbone import build_backbone

MODEL = "test_resnet"  # timm's own miniature


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model(MODEL).eval()


@pytest.fixture(scope="module")
def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "size", "dim", "side"),
    [
        ("resnet18", 64, 512, 2),
        ("test_mambaout", 64, 64, 2),
        ("swin_tiny_patch4_window7_224", 64, 768, 2),
        ("vit_tiny_patch16_224", 64, 192, 4),
        ("test_efficientnet", 64, 64, 2),
        ("resnet-small", 16, 64, 4),
        ("resnet-small", 64, 64, 16),
    ],
)
def test_every_family_gives_one_map_channels_first(name, size, dim, side):
    backbone = build_backbone(name, image_size=size).eval()
    with torch.no_grad():
        feature_map = backbone(images(size))
    assert backbone.dim == dim
    assert feature_map.shape == (2, dim, side, side)


def test_small_backbone_is_small_and_trains():
    torch.manual_seed(0)
    backbone = build_backbone("resnet-small")
    assert sum(p.numel() for p in backbone.parameters()) < 100_000
    backbone(images(16)).mean().backward()
    # the last normalisation of a block starts at zero, which holds back its convolutions for one step
    assert backbone.net.conv1[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["resnet19", "swinn_tiny", "resnet18.no_such_tag", "?"])
def test_unknown_name_gives_a_short_list(name):
    with pytest.raises(FedncaError, match="is not known; did you mean") as error:
        build_backbone(name)
    assert len(str(error.value)) < 250


def test_model_without_feature_maps_is_named():
    with pytest.raises(FedncaError, match="'convit_tiny' cannot be built"):
        build_backbone("convit_tiny")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("in_folder", [True, False])
def test_weight_file_gives_the_map_of_the_model_it_was_saved_from(model, weights, tmp_path, suffix, in_folder):
    file = tmp_path / f"{MODEL}_mine{suffix}"
    save_file(weights, file) if suffix == ".safetensors" else torch.save(weights, file)
    (tmp_path / "resnet50_other.pth").touch()
    backbone = build_backbone(MODEL, pretrained=str(tmp_path if in_folder else file)).eval()
    with torch.no_grad():
        assert_close(backbone(images()), model.forward_features(images()))


def test_weight_file_may_lack_classifier_and_counters(model, weights, tmp_path):
    bare = {k: v for k, v in weights.items() if not k.startswith("fc.") and not k.endswith("num_batches_tracked")}
    save_file(bare, tmp_path / f"{MODEL}.safetensors")
    backbone = build_backbone(MODEL, pretrained=str(tmp_path)).eval()
    with torch.no_grad():
        assert_close(backbone(images()), model.forward_features(images()))


def test_weights_of_another_image_size_are_resized(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_vit")
    save_file(model.state_dict(), tmp_path / "test_vit.safetensors")
    net = build_backbone("test_vit", pretrained=str(tmp_path), image_size=64).net.model
    assert torch.equal(net.blocks[3].mlp.fc1.weight, model.blocks[3].mlp.fc1.weight)
    assert net.pos_embed.shape[1] == 1 + (64 // 16) ** 2 < model.pos_embed.shape[1]
    assert torch.equal(net.pos_embed[:, 0], model.pos_embed[:, 0])


def test_small_backbone_loads_its_own_weights(tmp_path):
    torch.manual_seed(0)
    saved = build_backbone("resnet-small").eval()
    save_file(saved.net.state_dict(), tmp_path / "resnet-small.safetensors")
    loaded = build_backbone("resnet-small", pretrained=str(tmp_path)).eval()
    with torch.no_grad():
        assert_close(loaded(images()), saved(images()))


def test_weights_of_another_model_are_refused_with_names(weights, tmp_path):
    file = tmp_path / "weights.pth"
    torch.save(weights | {"layer1.9.bn1.bias": torch.zeros(3)}, file)
    with pytest.raises(FedncaError, match=r"1 unexpected: layer1\.9\.bn1\.bias\)"):
        build_backbone(MODEL, pretrained=str(file))
    torch.save({k: v for k, v in weights.items() if k != "conv1.0.weight"}, file)
    with pytest.raises(FedncaError, match=r"1 missing: conv1\.0\.weight\)"):
        build_backbone(MODEL, pretrained=str(file))
    torch.save(weights | {"conv1.0.weight": torch.zeros(1, 3, 3, 3)}, file)
    with pytest.raises(FedncaError, match=r"size mismatch for conv1\.0\.weight"):
        build_backbone(MODEL, pretrained=str(file))


class Trap:
    def __reduce__(self):
        return (Path("trap-was-run").touch, ())


def corrupt_files(weights):
    zipped, raw = Path("whole.pth"), b"not weights at all" * 10
    torch.save(weights, zipped)
    yield ".pth", zipped.read_bytes()[:100_000]
    yield ".pth", raw
    yield ".pth", b""
    yield ".pth", pickle.dumps(Trap(), protocol=2)
    yield ".pth", pickle.dumps([1, 2], protocol=2)
    yield ".safetensors", raw
    yield ".safetensors", b""


def test_corrupt_or_dangerous_files_are_one_sentence(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for suffix, content in corrupt_files(weights):
        file = Path(f"bad{suffix}")
        file.write_bytes(content)
        with pytest.raises(FedncaError, match=f"weight file 'bad{suffix}' cannot be read as plain tensors") as error:
            build_backbone(MODEL, pretrained=str(file))
        assert "\n" not in str(error.value)
    assert not Path("trap-was-run").exists()


def test_a_path_that_names_no_file_or_two_is_refused(tmp_path):
    with pytest.raises(FedncaError, match=r"nowhere\.pth' is not there; give a "):
        build_backbone(MODEL, pretrained=str(tmp_path / "nowhere.pth"))
    with pytest.raises(FedncaError, match=r"test_backbone\.py' is not a .* file; give one"):
        build_backbone(MODEL, pretrained=__file__)
    with pytest.raises(FedncaError, match=r"found: none"):
        build_backbone(MODEL, pretrained=str(tmp_path))
    for name in (f"{MODEL}_a.pth", f"{MODEL}_b.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(FedncaError, match=r"found: test_resnet_a\.pth, test_resnet_b\.safetensors"):
        build_backbone(MODEL, pretrained=str(tmp_path))


def test_imagenet_without_network_says_how_to_supply_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(FedncaError, match=r"'resnet18' cannot be downloaded.*--pretrained FILE"):
        build_backbone("resnet18", pretrained="imagenet")


def test_small_backbone_has_no_imagenet_weights():
    with pytest.raises(FedncaError, match="'resnet-small' has no published ImageNet weights"):
        build_backbone("resnet-small", pretrained="imagenet")


def test_group_norm_replaces_every_batch_norm_and_keeps_its_affine_weights(weights, tmp_path):
    changed = weights | {"layer4.0.bn1.weight": torch.full((96,), 3.0)}
    save_file(changed, tmp_path / f"{MODEL}.safetensors")
    net = build_backbone(MODEL, pretrained=str(tmp_path), norm="group").net
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    norm, x = net.layer4[0].bn1, torch.randn(2, 96, 8, 8)
    grouped = x.reshape(2, 32, -1)
    deviation = (grouped.var(dim=2, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = 3 * (grouped - grouped.mean(dim=2, keepdim=True)) / deviation
    assert_close(norm(x), expected.reshape(x.shape), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_activations_inside_a_norm_are_kept(norm):
    torch.manual_seed(0)
    net = build_backbone("test_efficientnet", norm=norm, image_size=64).net
    assert isinstance(net.bn1.act, nn.SiLU)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())


def test_batch_independence_of_group_norm():
    torch.manual_seed(0)
    backbone = build_backbone("resnet-small", norm="group").train()
    assert_close(backbone(images())[:1], backbone(images()[:1]), atol=1e-5, rtol=1e-5)


def test_frozen_norm_is_evaluation_mode_for_ever(weights, tmp_path):
    save_file(weights, tmp_path / f"{MODEL}.safetensors")
    frozen = build_backbone(MODEL, pretrained=str(tmp_path), norm="frozen").train()
    plain = build_backbone(MODEL, pretrained=str(tmp_path)).eval()
    assert_close(frozen(images()), plain(images()), atol=1e-4, rtol=1e-4)
    assert not any("bn" in name for name, _ in frozen.named_parameters())


@pytest.mark.data
def test_real_imagenet_file_loads_whole(data_folder):
    folder = data_folder / "weights"
    backbone = build_backbone("resnet18", pretrained=str(folder)).eval()
    given = load_file(folder / "resnet18_imagenet.safetensors")
    loaded = backbone.net.state_dict()
    assert loaded
    assert all(torch.equal(tensor, given[name]) for name, tensor in loaded.items() if name in given)
    assert all(name in given or name.endswith("num_batches_tracked") for name in loaded)
    assert backbone(images(224)).shape == (2, 512, 7, 7)
