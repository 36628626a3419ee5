"""The one config tree: the same fields are the TOML file, the command-line flags and their documentation."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fednca.errors import FedncaError, unknown_name
from fednca.files import is_utf8
from fednca.options import Options

PRESETS = Path(__file__).parent / "presets"
AnyOptions = TypeVar("AnyOptions", bound=Options)
Beta = Annotated[float, Field(ge=0, lt=1)]
OPTIONS_OF = {
    "data.name": "options",
    "method.name": "options",
    "method.learner": "learner_options",
    "method.closing": "closing_options",
}


class DataConfig(Options):
    """Which images, and how they are prepared."""

    name: str = "digits"
    """Dataset, as listed by `fednca datasets`."""
    root: str | None = None
    """Folder that holds the dataset's files, where it needs any."""
    image_size: int = Field(default=224, ge=8, le=2048)
    """Side in pixels to which every image is squashed."""
    normalize: Literal["auto", "imagenet", "half"] = "auto"
    """Mean and standard deviation: ImageNet's, 0.5 / 0.5, or by whether the backbone is pretrained."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """What an image that cannot be read does: stop everything, or be left out and counted."""
    cache: str | None = None
    """Folder where decoded images are kept for later runs; left out: the user's cache folder."""
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training images held out for validation where the dataset has no validation split."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own options, as listed by `fednca datasets NAME`."""


class PartitionConfig(Options):
    """How the training images are dealt to the clients."""

    kind: Literal["dirichlet", "natural"] = "dirichlet"
    """Deal the images at random by beta and gamma, or leave each with the site that the data names."""
    clients: int = Field(default=10, ge=1)
    """Number of clients K; with `natural`, the number of sites."""
    beta: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Dirichlet concentration: the smaller, the more unequal the clients."""
    gamma: float = Field(default=0.5, gt=0, le=1)
    """Share of the classes that a client may see."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draw, apart from the training seed."""
    unmatched: Literal["drop", "mask", "loss-mask"] = "drop"
    """Images whose labels fit no client: left out; or their other labels become absent; or unknown, without loss."""
    min_samples: int = Field(default=32, ge=1)
    """Fewest images a client must get; the draw is repeated until it holds."""


class ModelConfig(Options):
    """The feature extractor; the head on it belongs to the method."""

    backbone: str = "resnet18"
    """Any timm model with feature maps, or `resnet-small` for 16-64 px images on a CPU."""
    pretrained: str = "none"
    """`none`, `imagenet`, or a weights file or folder (.safetensors, .pth)."""
    norm: Literal["batch", "group", "frozen"] = "batch"
    """Normalisation layers: BatchNorm, GroupNorm in its place, or BatchNorm that never changes."""


class MethodConfig(Options):
    """The federated algorithm."""

    name: str = "fednca-ml"
    """Method, as listed by `fednca methods`."""
    learner: str | None = None
    """Take head and local loss from this other method, and only the federated rule from `name`."""
    closing: str | None = None
    """Close with what this other method closes with, or with `none`."""
    criterion: Literal["bce", "balanced", "asl"] | None = None
    """Take this in place of the learner's own BCE: BCE, class-balanced BCE, or the asymmetric loss."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own options, as listed by `fednca methods NAME`."""
    learner_options: dict[str, Any] = Field(default_factory=dict)
    """The learner's own options, where `learner` is given."""
    closing_options: dict[str, Any] = Field(default_factory=dict)
    """The closing's own options, where `closing` is given."""


class AugmentConfig(Options):
    """Random changes of training images, on the device; all off, as in the paper."""

    hflip: bool = False
    """Mirror half of the images left to right."""
    vflip: bool = False
    """Mirror half of the images top to bottom."""
    shift: float = Field(default=0.0, ge=0, le=0.5)
    """Largest shift in each direction, as a share of the side."""
    scale: float = Field(default=0.0, ge=0, lt=1)
    """Largest change of size: 0.1 is 90 to 110 percent."""
    rotate: float = Field(default=0.0, ge=0, le=180)
    """Largest rotation in degrees."""
    brightness: float = Field(default=0.0, ge=0, le=1)
    """Largest change of brightness, as a share of white."""
    contrast: float = Field(default=0.0, ge=0, lt=1)
    """Largest change of contrast: 0.2 is 80 to 120 percent."""


class TrainConfig(Options):
    """Rounds and local training."""

    rounds: int = Field(default=100, ge=1)
    """Communication rounds."""
    local_epochs: int = Field(default=1, ge=1)
    """Passes over a client's images per round."""
    batch_size: int = Field(default=32, ge=1)
    """Images per local step."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Local optimiser; its state starts afresh for every client and round."""
    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Learning rate, constant."""
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight decay on every trainable weight."""
    betas: tuple[Beta, Beta] | None = None
    """AdamW's betas; left out: the method's own, else 0.9 and 0.999."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """SGD's momentum."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest gradient norm; left out: the method's own, else no clipping."""
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part in a round."""
    weighting: Literal["equal", "samples"] = "equal"
    """Weights of the average: equal, or by number of images."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Write the state to go on from after every so many rounds, and when a run ends or stops."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """Arithmetic of training; bf16 is autocast with float32 weights."""
    augment: AugmentConfig = AugmentConfig()

    def clients_per_round(self, clients: int) -> int:
        """Return how many of the clients take part in a round."""
        return max(1, round(self.participation * clients))


class EvaluateConfig(Options):
    """When and by what a model is judged."""

    every: int = Field(default=1, ge=1)
    """Evaluate after every so many rounds, and after the last."""
    batch_size: int = Field(default=256, ge=1)
    """Images per evaluation batch."""
    select: Literal["macro_f1", "macro_auc", "micro_f1", "micro_auc", "mean_ap"] = "macro_f1"
    """Validation metric by which the best round is chosen."""
    collapse: bool = False
    """Measure neural collapse on validation images in every evaluated round."""


class CalibrateConfig(Options):
    """How the thresholds of the final model are chosen from the clients' validation shares."""

    goal: Literal["f1", "sensitivity", "specificity"] = "f1"
    """Best F1 of each class, or at least `target` sensitivity or specificity."""
    target: float = Field(default=0.9, gt=0, le=1)
    """The sensitivity or specificity wanted."""
    bins: int = Field(default=1000, ge=2, le=1_000_000)
    """Bins of the score histograms that clients send."""
    min_count: int = Field(default=0, ge=0)
    """Clients withhold counts below this."""


class Config(Options):
    """A whole run."""

    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    calibrate: CalibrateConfig = CalibrateConfig()
    seed: int = Field(default=0, ge=0)
    """Training seed: initial weights, batch order, dropout, sampled clients."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    engine: str = "auto"
    """How clients train: `eager`, `processes`, `graphs`, `package.module:Name`, or `auto`: the fastest that fits."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """Processes of the engine `processes`; left out: one for each core. The number changes no result."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of an operation; left out: torch's choice. Small networks want 1; sums round alike only if equal."""

    def to_toml(self) -> str:
        """Return the TOML text that `load_config` reads back to an equal config."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def replace(self, overrides: Mapping[str, Any]) -> "Config":
        """Return a config with the fields named by dotted paths changed: `{"train.rounds": 5}`.

        Another dataset, method or learner drops the options of the old one, whatever the order.
        """
        values = self.model_dump(mode="json")
        for path, value in sorted(overrides.items(), key=lambda item: item[0] not in OPTIONS_OF):
            *parents, leaf = path.split(".")
            node = values
            for part in parents:
                if not isinstance(node.get(part), dict):
                    raise unknown_name("setting", path, [known for known, _ in leaves()])
                node = node[part]
            if path in OPTIONS_OF and node[leaf] != value:
                node[OPTIONS_OF[path]] = {}  # another method's or dataset's
            node[leaf] = value
        return build_config(values)


def leaves(model: type[Options] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every settable field of a config tree as (dotted path, field)."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        elif not name.endswith("options"):
            yield prefix + name, field


def parse_value(path: str, field: FieldInfo, text: str) -> Any:  # noqa: ANN401
    """Turn a flag's text into the field's type; lists are written with commas, or as JSON."""
    if not is_utf8(text):
        raise FedncaError(f"setting '{path}' is '{text}', which is not UTF-8; rename what it names")
    optional = type(None) in get_args(field.annotation)
    if optional and text.lower() in {"none", "null"}:
        return None
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation)  # type: ignore[arg-type]
    listed = next((kind for kind in get_args(field.annotation) if get_origin(kind) in (tuple, list)), None)
    try:
        return adapter.validate_python(text if listed is None else split_list(text))
    except ValidationError as error:
        if listed is None:
            raise FedncaError(describe(error, path, text)) from None
        if error.errors()[0]["type"] in {"missing", "too_long"}:
            wanted = len(get_args(listed))
            raise FedncaError(f"setting '{path}' should be {wanted} values with commas between, not {text!r}") from None
        raise FedncaError(describe(error, path)) from None


def split_list(text: str) -> list[Any]:
    """Split a list at its commas, or read it as JSON, whose quotes a shell leaves alone within others.

    >>> split_list("cat, dog"), split_list('["cat", "dog, sitting"]')
    (['cat', 'dog'], ['cat', 'dog, sitting'])
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
        if text.lstrip().startswith("["):
            raise FedncaError(f'list {text} is not JSON; put single quotes around it: \'["cat", "dog"]\'') from None
    return found if isinstance(found, list) else [part.strip() for part in text.split(",")]


def describe(error: ValidationError, path: str = "", value: object = None) -> str:
    """Put the first problem of a validation error into one sentence."""
    problem = error.errors()[0]
    where = path or ".".join(str(part) for part in problem["loc"])
    got = problem["input"] if value is None else value
    if problem["type"] == "missing":
        return f"setting '{where}' is missing"
    if problem["type"] == "value_error":
        return f"setting '{where}': {problem['ctx']['error']}"
    message = re.sub(r"^[A-Z]\w* (?=should )", "", problem["msg"]).partition(", unable")[0]  # Input, Value, String, …
    return f"setting '{where}' {message}, not {got!r}"


def validate(model: type[AnyOptions], values: Mapping[str, Any], where: str = "") -> AnyOptions:
    """Check values against an Options class, strictly typed as TOML is; mistakes become one sentence."""
    try:
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "json_invalid":
            raise FedncaError(f"{where or 'a setting'} has text that is not UTF-8; rename what it names") from None
        path = ".".join([where, *map(str, problem["loc"])]).strip(".")
        if problem["type"] == "extra_forbidden":
            known: type[Options] = model
            for part in problem["loc"][:-1]:
                known = known.model_fields[str(part)].annotation  # type: ignore[assignment]
            section = path.rpartition(".")[0]
            names = [f"{section}.{name}".strip(".") for name in known.model_fields]
            raise unknown_name("setting", path, names or ["none"]) from None
        raise FedncaError(describe(error, path)) from None


def build_config(values: Mapping[str, Any]) -> Config:
    """Check a nested dict and return the config."""
    return validate(Config, values)


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def source_name(source: str | Path) -> str:
    """Return how a preset, or the settings of a TOML file, are called.

    >>> source_name("dermamnist-0.1"), source_name("my/settings-0.1.toml")
    ('dermamnist-0.1', 'settings-0.1')
    """
    return Path(source).name.removesuffix(".toml")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; what is wrong with it becomes one sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedncaError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError as error:  # TOML's and Unicode's errors, and numbers too long to read
        raise FedncaError(f"'{path}' is not valid TOML: {error}") from None


def load_config(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a preset by name, or a TOML file by path, and lay dotted overrides over it.

    >>> load_config("demo", {"train.rounds": 5}).train.rounds
    5
    """
    path = Path(source)
    if path.suffix != ".toml":
        if str(source) not in preset_names():
            raise unknown_name("preset", str(source), preset_names())
        path = PRESETS / f"{source}.toml"
    return build_config(read_toml(path)).replace(overrides or {})
