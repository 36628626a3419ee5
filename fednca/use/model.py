"""A run's trained model: images in, probabilities and evidence out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from fednca.base.devices import pick_device
from fednca.base.errors import FedncaError
from fednca.base.files import resuming
from fednca.data.images import read_resized, resize_array
from fednca.engines.images import ImageStore, Shard
from fednca.engines.scoring import score
from fednca.engines.workplace import build_store
from fednca.measures.thresholds import UNCALIBRATED
from fednca.models.evidence import evidence
from fednca.runs import Run

Source = str | Path | Image.Image | NDArray[np.uint8]
DEEP = ("I", "F")  # Pillow's modes for which no value is agreed to be white


class TrainedModel:
    """The final model of a run, or its best so far, with the run's own classes, preprocessing and thresholds.

    Example: `TrainedModel(Run("runs/demo/fednca-ml")).probabilities(["digit.png"])`.
    """

    def __init__(self, run: Run, device: str = "auto") -> None:
        """Load the model; `note` warns if it comes from an unfinished run, and is empty otherwise."""
        finished = (run.folder / "final.safetensors").exists()
        which = "final" if finished else "best"
        if not (run.folder / f"{which}.safetensors").exists():
            raise FedncaError(f"'{run.folder}' has no model yet; go on with {resuming(run.folder)}")
        state = run.state(which)
        self.run, self.which, self.round, self.finished = run, which, state.round, finished
        reached = f"round {state.round} of {run.config.train.rounds}"
        self.note = "" if finished else f"the run is not finished: this is its best model so far, from {reached}"
        self.classes = tuple(str(name) for name in run.environment["classes"])
        self.size = run.config.data.image_size
        own_name = f" '{Path(run.config.data.root).name}'" if run.config.data.root else ""
        self.data = f"{run.config.data.name}{own_name}"  # name of the training data, to show to people
        self.device = pick_device(device)
        self.model = load_model(run, which).to(self.device)
        self.calibrated = state.thresholds is not None
        uncalibrated = torch.full((len(self.classes),), UNCALIBRATED, dtype=torch.float64)
        self.thresholds = uncalibrated if state.thresholds is None else state.thresholds.double()

    def probabilities(self, images: Sequence[Source], batch_size: int = 64) -> Tensor:
        """Return the probability of each class in each image: (N, C).

        images: files, Pillow images or arrays (H, W, 3).
        """
        batches = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
        scored = [self.score(np.stack([to_pixels(image, self.size) for image in batch])) for batch in batches]
        return torch.cat([torch.empty(0, len(self.classes), dtype=torch.float64), *scored])

    @torch.inference_mode()
    def score(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return probabilities for images of the model's size: (n, size, size, 3) → (n, C)."""
        if not len(pixels):
            return torch.empty(0, len(self.classes), dtype=torch.float64)
        found = score(self.run.method, self.model, self.normalise(pixels), self.run.config.train)
        return found.double().cpu()

    def evidence(self, pixels: NDArray[np.uint8], classes: Sequence[int]) -> NDArray[np.float32]:
        """Return where the model finds these classes: (n, size, size, 3) → (n, k, size, size) in [0, 1]."""
        found: NDArray[np.float32] = evidence(self.model, self.normalise(pixels), classes).float().cpu().numpy()
        return found

    def normalise(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Turn pixels into the model's input, as in training: (n, size, size, 3) → (n, 3, size, size)."""
        shard = Shard.build(self._store(pixels), np.arange(len(pixels)), np.empty((len(pixels), 0), np.int8))
        return next(shard.batches(len(pixels)))[0]

    def moments(self) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of the normalisation per channel, for values from 0 to 1."""
        store = self._store(np.empty((0, self.size, self.size, 3), np.uint8))
        mean, std = ([round(value / 255, 6) for value in moment.tolist()] for moment in (store.mean, store.std))
        return mean, std

    def _store(self, pixels: NDArray[np.uint8]) -> ImageStore:
        return build_store(self.run.config, pixels, self.device)

    def thresholds_by(self, choice: str) -> Tensor:
        """Return thresholds (C,): the calibrated ones, 0.5 if there are none, or one number for all classes."""
        if choice == "calibrated":
            return self.thresholds
        try:
            number = float(choice)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            raise FedncaError(f"threshold '{choice}' is neither 'calibrated' nor a number from 0 to 1")
        return torch.full_like(self.thresholds, number)


def load_model(run: Run, which: str) -> nn.Module:
    """Build a run's model; the error names any file outside the run's folder that is missing."""
    try:
        return run.model(which)
    except FedncaError as error:
        raise FedncaError(f"the model of '{run.folder}' cannot be built: {error}") from error


def to_pixels(image: Source, size: int) -> NDArray[np.uint8]:
    """Squash a file, Pillow image or array to (size, size, 3), as in training."""
    if isinstance(image, str | Path):
        return read_resized(Path(image), size)
    if isinstance(image, Image.Image):
        if image.mode.startswith(DEEP):
            raise FedncaError(
                f"a picture of mode '{image.mode}' has no agreed value for white; give the path of its file"
            )
        upright = ImageOps.exif_transpose(image)
        upright.info.pop("transparency", None)
        image = np.array(upright.convert("RGB"))
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise FedncaError(f"an image is {image.dtype} of shape {image.shape}; give uint8 of shape (H, W, 3)")
    resized: NDArray[np.uint8] = resize_array(image[None], size)[0]
    return resized
