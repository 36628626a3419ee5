"""Probabilities, labels and evidence for image files, and how to write them."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednca.base.files import explain_write
from fednca.data.images import ImageError, read_image
from fednca.models.overlay import overlay, shrink
from fednca.use.model import TrainedModel
from fednca.use.reading import read_batches

DIGITS = 6  # decimals of a probability in a file


@dataclass(frozen=True)
class Prediction:
    """A model's output for an image: probabilities, the classes above their thresholds, and pictures of these."""

    path: Path
    probabilities: dict[str, float]
    labels: tuple[str, ...]
    evidence: dict[str, Path] = field(default_factory=dict)

    def likeliest(self) -> str:
        """Name the class with the highest probability."""
        return max(self.probabilities, key=self.probabilities.__getitem__)


def predict(
    model: TrainedModel,
    paths: Sequence[Path],
    threshold: str = "calibrated",
    *,
    batch_size: int = 64,
    evidence: Path | None = None,
) -> Iterator[Prediction | ImageError]:
    """Yield the prediction for each file in order, or the reason why it cannot be read.

    evidence: folder for a picture of each class found, or of the likeliest class if none is found.
    """
    thresholds = model.thresholds_by(threshold).numpy()
    for batch in read_batches(paths, model.size, batch_size):
        scores = model.score(batch.pixels).numpy()
        found: dict[int, Prediction | ImageError] = dict(batch.failed)
        for row, own in zip(batch.rows, scores, strict=True):
            labels = tuple(name for name, p, t in zip(model.classes, own, thresholds, strict=True) if p > t)
            found[row] = Prediction(paths[row], dict(zip(model.classes, own.tolist(), strict=True)), labels)
        for row in sorted(found):
            each = found[row]
            if evidence is not None and isinstance(each, Prediction):
                each = draw_evidence(model, each, batch.pixels[batch.rows.index(row)], evidence, f"{row + 1:05d}")
            yield each


def draw_evidence(
    model: TrainedModel, prediction: Prediction, pixels: NDArray[np.uint8], folder: Path, prefix: str
) -> Prediction:
    """Write a picture of the evidence for each class found; return the prediction with the files."""
    names = prediction.labels or (prediction.likeliest(),)
    numbers = [model.classes.index(name) for name in names]
    heats = model.evidence(pixels[None], numbers)[0]
    picture = shrink(read_image(prediction.path))
    files = {}
    for name, number, heat in zip(names, numbers, heats, strict=True):
        file = folder / f"{prefix}-{plain(prediction.path.stem)}-{number}-{plain(name)}.png"
        with explain_write(file):
            Image.fromarray(overlay(picture, heat)).save(file)
        files[name] = file
    return Prediction(prediction.path, prediction.probabilities, prediction.labels, files)


def plain(text: str) -> str:
    """Return a text in a form that fits file names on any system.

    >>> plain("Pleural effusion / left")
    'Pleural-effusion-left'
    """
    return re.sub(r"\W+", "-", text).strip("-")[:60] or "x"


def to_json(model: TrainedModel, threshold: str, found: Sequence[Prediction], failed: Sequence[ImageError]) -> str:
    """Write predictions as JSON, with the model, round and thresholds behind them."""
    thresholds = dict(zip(model.classes, model.thresholds_by(threshold).tolist(), strict=True))
    facts = {
        "run": str(model.run.folder),
        "method": model.run.title,
        "round": model.round,
        "finished": model.finished,
        "thresholds": thresholds,
        "images": [_json(each) for each in found],
        "unreadable": [{"image": str(error.path), "problem": error.problem} for error in failed],
    }
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def _json(prediction: Prediction) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "image": str(prediction.path),
        "labels": list(prediction.labels),
        "probabilities": {name: round(p, DIGITS) for name, p in prediction.probabilities.items()},
    }
    if prediction.evidence:
        facts["evidence"] = {name: str(file) for name, file in prediction.evidence.items()}
    return facts


def to_csv(classes: Sequence[str], found: Sequence[Prediction]) -> str:
    """Write predictions as CSV: the image, its labels separated by |, and the probability of each class."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["image", "labels", *classes])
    for each in found:
        values = [f"{p:.{DIGITS}f}" for p in each.probabilities.values()]
        writer.writerow([str(each.path), "|".join(each.labels), *values])
    return buffer.getvalue()
