"""Backbones: any timm model, used up to its last feature map."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from math import gcd
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from fednca.errors import FedncaError

if TYPE_CHECKING:
    from timm.models import PretrainedCfg

SMALL = "resnet-small"
# Two stages after a narrow stem: 16 px images keep a 4x4 map, and one CPU core trains a batch of 32 in about 10 ms.
_SMALL_ARGUMENTS: dict[str, Any] = {"stem_type": "deep", "stem_width": 16, "layers": (1, 1), "channels": (32, 64)}
_CLASSIFIERS = ("fc.", "head.", "classifier.")
_SUFFIXES = (".safetensors", ".pth")


class Backbone(nn.Module):
    """A timm feature extractor that returns its last feature map: (B, 3, H, W) → (B, d, H', W')."""

    def __init__(self, net: nn.Module) -> None:
        """Wrap a model built with `features_only=True`."""
        super().__init__()
        self.net = net
        self.dim = int(net.feature_info.channels()[-1])  # type: ignore[operator, union-attr]
        self.channels_last = getattr(net, "output_fmt", "NCHW") == "NHWC"

    def forward(self, images: Tensor) -> Tensor:
        """Return the last feature map of images (B, 3, H, W)."""
        feature_map: Tensor = self.net(images)[-1]
        return feature_map.permute(0, 3, 1, 2) if self.channels_last else feature_map


def build_backbone(
    name: str = "resnet18",
    *,
    pretrained: str = "none",
    norm: Literal["batch", "group", "frozen"] = "batch",
    image_size: int | None = None,
) -> Backbone:
    """Build a backbone by its timm name, or "resnet-small" for small images on a CPU.

    pretrained: "none", "imagenet" (downloaded by timm), or the path of a weight file or of a folder that holds one.
    norm: "group" replaces batch normalisation by group normalisation, "frozen" fixes its statistics and weights.
    image_size: in pixels; only models with a fixed input size need it.
    """
    from timm.layers.norm_act import freeze_batch_norm_2d

    record = _record(name)
    options: dict[str, Any] = {"img_size": image_size} if record.fixed_input_size else {}
    if pretrained == "imagenet" and not record.has_weights:
        raise FedncaError(f"backbone '{name}' has no published ImageNet weights; use `--pretrained FILE` or `none`")
    if pretrained not in ("none", "imagenet"):
        file = _find_file(name, Path(pretrained))
        _check_keys(file, given=_read_keys(file), wanted=set(_create(name, options).state_dict()))
        # timm's custom loaders expect another file format
        options["pretrained_cfg_overlay"] = {"file": str(file), "custom_load": False}
    options |= {"pretrained": pretrained != "none", "features_only": True, "out_indices": (-1,)}
    with _impatient_hub() if pretrained == "imagenet" else nullcontext():
        net = _create(name, options)
    if name == SMALL:
        net.maxpool = nn.Identity()
    if norm == "group":
        _group_batch_norm(net)
    elif norm == "frozen":
        net = freeze_batch_norm_2d(net)  # type: ignore[no-untyped-call]
    return Backbone(net)


def _record(name: str) -> "PretrainedCfg":
    """Return timm's record of a model; resnet-small is our own and has no published weights."""
    import timm
    from timm.models import PretrainedCfg

    if name == SMALL:
        return PretrainedCfg()
    try:
        record = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # a known model with an unknown tag, as in "resnet18.tag"
        record = None
    if record is None:
        near = get_close_matches(name, [*timm.list_models(), SMALL], n=4) or ["resnet18", "resnet50"]
        raise FedncaError(
            f"backbone '{name}' is not known; did you mean {' or '.join(near)}? (known: '{SMALL}' and all of timm's)"
        )
    return record


def _create(name: str, options: dict[str, Any]) -> nn.Module:
    """Call `timm.create_model`, and turn its errors into one sentence."""
    import timm

    try:
        if name == SMALL:
            return timm.create_model("resnet18", **_SMALL_ARGUMENTS, **options)
        return timm.create_model(name, **options)
    except OSError as error:
        raise FedncaError(
            f"the ImageNet weights of '{name}' cannot be downloaded (no network?); give them with `--pretrained FILE`"
        ) from error
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise FedncaError(
            f"backbone '{name}' cannot be built ({shorten(str(error), 200)}); choose another one, image size or weights"
        ) from error


@contextmanager
def _impatient_hub() -> Iterator[None]:
    """Use the local cache at once if the hub cannot be reached, instead of retrying for a minute."""
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # noqa: BLE001 (of requests or of httpx, depending on the hub's version)
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _find_file(name: str, path: Path) -> Path:
    """Return the weight file at a path, which may be the file or its folder."""
    if path.is_dir():
        stem = name.partition(".")[0]  # without the tag of the published weights
        found = sorted(p for p in path.iterdir() if p.name.startswith(stem) and p.suffix in _SUFFIXES)
        if len(found) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise FedncaError(
                f"folder '{path}' must hold one {' or '.join(_SUFFIXES)} file whose name starts with '{stem}' "
                f"(found: {names}); name the file itself"
            )
        return found[0]
    kinds = " or ".join(_SUFFIXES)
    if not path.is_file():
        raise FedncaError(f"weight file '{path}' is not there; give a {kinds} file, 'imagenet' or 'none'")
    if path.suffix not in _SUFFIXES:
        raise FedncaError(f"weight file '{path}' is not a {kinds} file; give one, 'imagenet' or 'none'")
    return path


def _read_keys(file: Path) -> set[str]:
    """Return the names of the tensors in a weight file, without unpickling objects."""
    from safetensors import SafetensorError
    from timm.models import load_state_dict

    try:
        return set(load_state_dict(str(file), weights_only=True))
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, AttributeError) as error:
        raise FedncaError(
            f"weight file '{file}' cannot be read as plain tensors ({shorten(str(error), 120)}); download it again"
        ) from error


def _check_keys(file: Path, given: set[str], wanted: set[str]) -> None:
    """Refuse weights of another model; the classifier's do not matter, and batch counters may be missing."""
    wanted, given = ({key for key in keys if not key.startswith(_CLASSIFIERS)} for keys in (wanted, given))
    missing = sorted(key for key in wanted - given if not key.endswith("num_batches_tracked"))
    unexpected = sorted(given - wanted)
    if missing or unexpected:
        faults = [
            f"{len(keys)} {word}: {', '.join(keys[:3])}"
            for word, keys in (("missing", missing), ("unexpected", unexpected))
            if keys
        ]
        raise FedncaError(
            f"weight file '{file}' does not fit the backbone ({'; '.join(faults)}); use weights of this backbone"
        )


def _group_batch_norm(module: nn.Module) -> None:
    """Replace every BatchNorm2d in a module by a GroupNorm with the same affine weights."""
    from timm.layers.norm_act import BatchNormAct2d, GroupNormAct

    for name, child in module.named_children():
        if not isinstance(child, nn.BatchNorm2d):
            _group_batch_norm(child)
            continue
        groups = gcd(32, child.num_features)
        norm = GroupNormAct(child.num_features, groups, eps=child.eps, affine=child.affine, apply_act=False)
        norm.load_state_dict(dict(child.named_parameters()))
        if isinstance(child, BatchNormAct2d):
            norm.drop, norm.act = child.drop, child.act
        setattr(module, name, norm)
