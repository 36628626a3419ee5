"""A model card: what a trained model is, what it learnt from, how well it does on each class, and its limits."""

from collections.abc import Iterable, Sequence
from typing import Any

from fednca.base.errors import FedncaError
from fednca.data.facts import partition_report
from fednca.data.federation import Federation
from fednca.data.sources import get_source
from fednca.measures.metrics import SHOWN
from fednca.methods import find_method
from fednca.runs import Run
from fednca.runs.training import plain
from fednca.use.data import dataset_of
from fednca.use.model import TrainedModel

HOLDS = {
    "onnx": "(ONNX)",
    "torchscript": "(TorchScript)",
    "safetensors": "holds the weights of a model that",
}
FEW = 20  # a class with fewer test images gets a warning
MEANS = SHOWN | {"mean_ap": "mAP"}


def model_card(model: TrainedModel, file: str, kind: str) -> str:
    """Write the card of a model in a file of this kind, as Markdown."""
    run, report = model.run, partition_facts(model.run)
    parts = [
        f"# {run.title} on {model.data}",
        f"`{file}` {HOLDS[kind]} gives an image a probability for each of {len(model.classes)} classes; "
        "an image may show several of them or none.",
        *([f"**{model.note[0].upper()}{model.note[1:]}.**"] if model.note else []),
        section("How to use it", usage(model)),
        section("Data", data_facts(run, report)),
        section("Method", method_facts(run)),
        section("Federation", federation_facts(run, report)),
        section("Training", training_facts(model)),
        f"## Results\n\n{results(model, report)}",
        section("Limits", limits(model, report)),
    ]
    return "\n\n".join(parts) + "\n"


def section(title: str, lines: Iterable[str]) -> str:
    """Write a list under a heading."""
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)


def partition_facts(run: Run) -> dict[str, Any] | None:
    """Describe who held what; None if the dataset's labels are gone. The images are not needed."""
    try:
        federation = Federation.load(run.folder / "partition.npz", dataset_of(run))
    except FedncaError:
        return None
    return partition_report(federation, run.config.partition.model_dump())


def usage(model: TrainedModel) -> list[str]:
    """Explain the model's input and output."""
    mean, std = model.moments()
    return [
        f"Decode to RGB and squash to {model.size} × {model.size} pixels (bilinear with antialiasing, as Pillow does).",
        f"Normalise each channel: (byte / 255 - mean) / std with mean {mean} and std {std}; layout (batch, 3, height, "
        "width), float32.",
        "A class counts as found where its probability is above its threshold in the table below; the file's metadata "
        "holds class names and thresholds, too.",
        "With fednca and the run's folder `RUN`: `fednca predict RUN IMAGES` or `fednca serve RUN`.",
    ]


def data_facts(run: Run, report: dict[str, Any] | None) -> list[str]:
    """Describe the data that the model learnt from."""
    source = get_source(run.config.data.name)
    lines = [f"{run.config.data.name}: {source.SUMMARY}; licence: {source.LICENCE}."]
    if report is None:
        return [*lines, "The dataset was not there when this card was written, so its counts are missing."]
    images = report["images"]
    lines.append(f"Images: {images['train']} train, {images['val']} validation, {images['test']} test.")
    share = report["all_zero"]["train"]
    if share is not None:
        lines.append(f"Training images without any class: {share:.0%}.")
    unreadable = sum(report["unreadable"].values())
    return [*lines, f"Images left out because they could not be read: {unreadable}."] if unreadable else lines


def method_facts(run: Run) -> list[str]:
    """Describe the method: the federated rule, the learner, its head and its options."""
    config, chosen = run.config, run.config.method
    rule, learner = find_method(chosen.name).about, find_method(chosen.learner or chosen.name).about
    lines = [f"Federated rule: {chosen.name} ({rule.paper}); aggregation: {rule.aggregation}."]
    if chosen.learner is not None:
        lines.append(f"Learner (head and local loss): {chosen.learner} ({learner.paper}).")
    if chosen.closing is not None:
        lines.append(f"Closing: {chosen.closing}.")
    lines += [
        f"Head: {learner.head}; objective: {chosen.criterion or learner.objective}.",
        f"Formula: `{learner.formula}`.",
        f"Backbone: {config.model.backbone} (initial weights: {config.model.pretrained}, norm: {config.model.norm}).",
    ]
    own = {name: value for part in run.method.parts.values() for name, value in plain(part).items()}
    options = ", ".join(f"{name} = {value}" for name, value in own.items())
    return [*lines, f"Options: {options}."] if options else lines


def federation_facts(run: Run, report: dict[str, Any] | None) -> list[str]:
    """Describe the clients and how much they differ."""
    config = run.config.partition
    if run.method.rule.centralized:
        return ["None: training saw all images in one place."]
    if config.kind == "natural":
        lines = [f"{config.clients} clients, one for each site in the data."]
    else:
        lines = [
            f"{config.clients} clients; beta = {config.beta:g} (how evenly the clients that hold a class share its "
            f"images: the smaller, the less evenly), gamma = {config.gamma:g} (the share of all classes that a client "
            f"may hold), seed {config.seed}."
        ]
    if report is None:
        return lines
    told = {
        "label_distance": "Distance between the label distributions",
        "cooccurrence_distance": "The same for pairs of labels on one image",
    }
    for key, name in told.items():
        value = "not defined" if report[key] is None else f"{report[key]:.3f}"
        lines.append(f"{name} of two clients, on average (0: equal, 1: nothing in common): {value}.")
    sizes = [client["images"] for client in report["clients"]]
    held = [len(client["allowed_classes"]) for client in report["clients"]]
    lines.append(f"Training images of a client: {min(sizes)} to {max(sizes)}; classes: {min(held)} to {max(held)}.")
    return lines


def training_facts(model: TrainedModel) -> list[str]:
    """Describe the training and the round that the model comes from."""
    config, packages = model.run.config, model.run.environment["packages"]
    train = config.train
    return [
        f"Rounds: {train.rounds}, local epochs: {train.local_epochs}, {train.optimizer}, learning rate: {train.lr:g}, "
        f"batches of {train.batch_size}, seed: {config.seed}, {train.precision}.",
        f"The model comes from round {model.round}, the best by {config.evaluate.select} on validation images.",
        f"Made with {', '.join(f'{name} {number}' for name, number in packages.items() if number)}.",
    ]


def results(model: TrainedModel, report: dict[str, Any] | None) -> str:
    """Write metrics on test images, overall and by class, at 0.5 and at the calibrated thresholds."""
    chosen = model.run.results["val"]
    plain, calibrated = chosen["test"], chosen.get("calibrated", {}).get("test") if model.calibrated else None
    means = [[name, percent(plain[key]), percent(calibrated and calibrated[key])] for key, name in MEANS.items()]
    counts = report["positives"] if report else {"train": {}, "test": {}}
    columns = ["class", "train", "test", "AUC", "AP", "F1 at 0.5", "threshold", "F1 at threshold"]
    rows = [
        [
            name,
            *(str(counts[part].get(name, "–")) for part in ("train", "test")),
            *(percent(plain[f"class_{kind}"][c]) for kind in ("auc", "ap", "f1")),
            f"{model.thresholds[c]:.3f}" if model.calibrated else "–",
            percent(calibrated and calibrated["class_f1"][c]),
        ]
        for c, name in enumerate(model.classes)
    ]
    said = "On test images, in percent; a dash is an undefined or unknown value. Calibrated thresholds were chosen on "
    said += "the clients' validation images. `train` and `test` count the images that show a class."
    return "\n\n".join([said, table(["metric", "at 0.5", "calibrated"], means), table(columns, rows)])


def limits(model: TrainedModel, report: dict[str, Any] | None) -> list[str]:
    """List what the numbers do not cover."""
    lines = [
        f"It was tested on images of {model.data} only. On images from another camera, clinic or population expect "
        "worse, and measure it with `fednca evaluate RUN --data DIR`.",
        "It knows its own classes only. It does not report anything else in an image, and it gives probabilities even "
        "to an image of something else.",
        "Its probabilities rank images; they are not frequencies. Calibrated thresholds fit data in which a class is "
        "as common as in the validation images.",
        "Evidence maps show where the model looked; they do not show why, or that it is right.",
    ]
    if report is not None:
        rare = [name for name, count in report["positives"]["test"].items() if count < FEW]
        if rare:
            lines.insert(0, f"Fewer than {FEW} test images show {', '.join(rare)}: these rows say little.")
    if not model.calibrated:
        lines.append("It has no calibrated thresholds: 0.5 is used for every class.")
    return lines


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table with numbers aligned right.

    >>> print(table(["class", "n"], [["a|b", "3"]]))
    | class | n |
    |---|---:|
    | a\\|b | 3 |
    """
    lines = [header, *rows]
    written = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    written.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")
    return "\n".join(written)


def percent(share: float | None) -> str:
    """Write a share in percent, and None as a dash."""
    return "–" if share is None else f"{100 * share:.1f}"
