"""The one tree of settings: its fields make the TOML files, the command-line flags and their help."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from fednca.base.errors import unknown_name
from fednca.config.options import Options, validate

Beta = Annotated[float, Field(ge=0, lt=1)]
OPTIONS_OF = {
    "data.name": "options",
    "method.name": "options",
    "method.learner": "learner_options",
    "method.closing": "closing_options",
}


class DataConfig(Options):
    """Which images to use, and how to prepare them."""

    name: str = "digits"
    """Name of the dataset; `fednca datasets` lists them."""
    root: str | None = None
    """Folder with the dataset's files, if it needs any."""
    image_size: int = Field(default=224, ge=8, le=2048)
    """Every image is resized to a square with sides of this many pixels, whatever its shape."""
    normalize: Literal["auto", "imagenet", "half"] = "auto"
    """Mean and standard deviation of pixels: `auto` is ImageNet's for pretrained weights, else 0.5 (`half`)."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """What to do with an image that cannot be read: stop, or leave it out and count it."""
    cache: str | None = None
    """Folder that keeps decoded images for later runs. Default: the user's cache folder."""
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training images held out for validation if the dataset has no validation split."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own options; `fednca datasets NAME` lists them."""


class PartitionConfig(Options):
    """How the training images are divided among the clients."""

    kind: Literal["dirichlet", "natural"] = "dirichlet"
    """Divide the images at random, by beta and gamma, or keep each at the site named in the data."""
    clients: int = Field(default=10, ge=1)
    """Number of clients; for `natural` it follows from the data."""
    beta: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Concentration of the Dirichlet distribution: the smaller it is, the more the clients differ."""
    gamma: float = Field(default=0.5, gt=0, le=1)
    """Share of the classes that each client may have."""
    seed: int = Field(default=0, ge=0)
    """Seed of the partition, separate from the training seed."""
    unmatched: Literal["drop", "mask", "loss-mask"] = "drop"
    """Images that fit no client's classes: leave them out, or set the labels that do not fit to absent or unknown."""
    min_samples: int = Field(default=32, ge=1)
    """Fewest images of a client; the draw is repeated until every client has them."""


class ModelConfig(Options):
    """The feature extractor; the method adds the head."""

    backbone: str = "resnet18"
    """Any timm model that returns feature maps, or `resnet-small` for images of 16 to 64 px on a CPU."""
    pretrained: str = "none"
    """Weights to start from: `none`, `imagenet`, or a file or folder (.safetensors, .pth)."""
    norm: Literal["batch", "group", "frozen"] = "batch"
    """Normalisation layers: BatchNorm, GroupNorm in its place, or BatchNorm whose statistics and weights are fixed."""


class MethodConfig(Options):
    """The federated algorithm."""

    name: str = "fednca-ml"
    """Name of the method; `fednca methods` lists them."""
    learner: str | None = None
    """Another method, whose learner (head and local loss) replaces that of `name`."""
    closing: str | None = Field(default=None, examples=["none"])
    """Another method, whose closing (what completes each model that is judged) replaces that of `name`; or `none`."""
    criterion: Literal["bce", "balanced", "asl"] | None = None
    """Loss in place of the learner's own BCE: plain BCE, class-balanced BCE, or the asymmetric loss."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own options; `fednca methods NAME` lists them."""
    learner_options: dict[str, Any] = Field(default_factory=dict)
    """The learner's own options, if `learner` is given."""
    closing_options: dict[str, Any] = Field(default_factory=dict)
    """The closing's own options, if `closing` is given."""


class AugmentConfig(Options):
    """Random changes of training images, made on the device; by default none, as in the paper."""

    hflip: bool = False
    """Mirror half of the images left to right."""
    vflip: bool = False
    """Mirror half of the images top to bottom."""
    shift: float = Field(default=0.0, ge=0, le=0.5)
    """Largest shift in each direction, as a share of the image's side."""
    scale: float = Field(default=0.0, ge=0, lt=1)
    """Largest change of size: 0.1 means 90 to 110 percent."""
    rotate: float = Field(default=0.0, ge=0, le=180)
    """Largest rotation in degrees."""
    brightness: float = Field(default=0.0, ge=0, le=1)
    """Largest change of brightness, as a share of white."""
    contrast: float = Field(default=0.0, ge=0, lt=1)
    """Largest change of contrast: 0.2 means 80 to 120 percent."""


class TrainConfig(Options):
    """Rounds and local training."""

    rounds: int = Field(default=100, ge=1)
    """Number of communication rounds."""
    local_epochs: int = Field(default=1, ge=1)
    """Passes over a client's images in each round."""
    batch_size: int = Field(default=32, ge=1)
    """Images in a training batch."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Local optimiser; its state is reset for every client in every round."""
    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Learning rate; it stays constant."""
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight decay on every trainable weight."""
    betas: tuple[Beta, Beta] | None = None
    """AdamW's betas. Default: the method's own, or 0.9 and 0.999."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """SGD's momentum."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient. Default: the method's own, or no clipping."""
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part in each round."""
    weighting: Literal["equal", "samples"] = "equal"
    """Weight of a client in the average: the same for all, or its number of images."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Rounds from one checkpoint to the next; a run that ends or stops writes one too."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """Precision of training; bf16 means autocast with float32 weights."""
    augment: AugmentConfig = AugmentConfig()

    def clients_per_round(self, clients: int) -> int:
        """Return how many of the clients take part in a round."""
        return max(1, round(self.participation * clients))


class EvaluateConfig(Options):
    """When the global model is evaluated, and which metric chooses the best round."""

    every: int = Field(default=1, ge=1)
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    batch_size: int = Field(default=256, ge=1)
    """Images in an evaluation batch."""
    select: Literal["macro_f1", "macro_auc", "micro_f1", "micro_auc", "mean_ap"] = "macro_f1"
    """Validation metric that chooses the best round."""
    collapse: bool = False
    """Measure neural collapse on the validation images in every evaluated round."""


class CalibrateConfig(Options):
    """How the final model's thresholds, one per class, are chosen on the clients' validation images."""

    goal: Literal["f1", "sensitivity", "specificity"] = "f1"
    """What a threshold should give: the best F1, or a sensitivity or specificity of at least `target`."""
    target: float = Field(default=0.9, gt=0, le=1)
    """Sensitivity or specificity to reach."""
    bins: int = Field(default=1000, ge=2, le=1_000_000)
    """Number of bins in the score histograms that clients send."""
    min_count: int = Field(default=0, ge=0)
    """Clients do not send counts smaller than this."""


class Config(Options):
    """All settings of a run."""

    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    calibrate: CalibrateConfig = CalibrateConfig()
    seed: int = Field(default=0, ge=0)
    """Training seed: it decides initial weights, batch order, dropout and which clients take part."""
    device: str = "auto"
    """Where to train: `auto`, `cpu`, `cuda` or `cuda:N`."""
    engine: str = "auto"
    """How clients train: `eager`, `processes`, `graphs`, `package.module:Name`, or `auto`: the fastest that fits."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """Number of processes for the engine `processes`; it does not change results. Default: one per core."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per operation; small networks need 1. It changes how sums round. Default: torch's choice."""

    def to_toml(self) -> str:
        """Return the TOML text that `load_config` reads back to an equal config."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def replace(self, overrides: Mapping[str, Any]) -> "Config":
        """Return a copy with some fields changed, each named by its dotted path: `{"train.rounds": 5}`.

        A new dataset, method, learner or closing drops the options of the old one, whatever the order of the changes.
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
                node[OPTIONS_OF[path]] = {}  # these belong to the old one
            node[leaf] = value
        return build_config(values)


def leaves(model: type[Options] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every settable field of a config tree as (dotted path, field)."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        elif not name.endswith("options"):
            yield prefix + name, field


def build_config(values: Mapping[str, Any]) -> Config:
    """Check a nested dict and return the config."""
    return validate(Config, values)
