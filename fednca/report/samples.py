"""What a trained model sees in test images: features, their t-SNE map, and where it finds each class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fednca.base.devices import pick_device
from fednca.base.errors import FedncaError
from fednca.base.randomness import derive_seed, numpy_rng
from fednca.data.examples import choose_rows
from fednca.data.federation import Federation
from fednca.data.store import StoredImages
from fednca.data.types import FileImages
from fednca.engines.images import Shard
from fednca.engines.workplace import build_store
from fednca.measures.collapse import Pairs, class_means, positive_pairs
from fednca.models.evidence import attention_maps, evidence, grad_cam

if TYPE_CHECKING:
    from fednca.runs import Run

SEED = 0  # for every random choice, so that pictures are the same each time
FEWEST_POINTS = 5  # fewer get no t-SNE map
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Look:
    """What one model makes of the sampled images and the examples; all arrays are on the CPU."""

    pairs: Pairs  # of the sampled test images
    means: Floats  # (C, d), NaN where no sampled image shows the class
    probabilities: Floats  # (E, C), of the examples
    evidence: Floats  # (E, C, H, W), in [0, 1]
    grad_cam: Floats  # (E, C, H', W')
    attention: Floats | None  # (E, heads, C, H', W'), None for a model without label-aware attention


def checkpoint_of(run: "Run") -> str | None:
    """Return the checkpoint to look at: `final`, else `best`, else `last`, or None if there is none yet."""
    return next((name for name in ("final", "best", "last") if (run.folder / f"{name}.safetensors").is_file()), None)


def sample_rows(federation: Federation, most: int) -> NDArray[np.intp]:
    """Draw at most `most` test images at random; return their rows in order."""
    number = len(federation.dataset.test)
    drawn = numpy_rng(SEED, "pictures").permutation(number)[:most]
    return np.sort(drawn)


def choose_examples(labels: NDArray[np.int8], count: int) -> list[int]:
    """Choose random images that together show many classes; labels: (N, C)."""
    order = numpy_rng(SEED, "examples").permutation(len(labels))
    return [int(row) for row in order[choose_rows(labels[order] == 1, count)]]


def pixels(images: NDArray[np.uint8] | FileImages | StoredImages, rows: Sequence[int]) -> NDArray[np.uint8]:
    """Return the raw pixels of some images (n, H, W, 3)."""
    if isinstance(images, FileImages):
        raise FedncaError("the images are still files; load the dataset with fednca.data.load.load_dataset")
    wanted = np.asarray(rows, np.intp)
    return images.take(wanted) if isinstance(images, StoredImages) else images[wanted]


def look(run: "Run", federation: Federation, rows: NDArray[np.intp], examples: list[int]) -> Look:
    """Run a model on test images: on `rows` for their features, on `examples` for everything else."""
    device, which = pick_device("auto"), checkpoint_of(run)
    model = run.model(which or "final").to(device)
    test = federation.dataset.test
    store = build_store(run.config, test.images, device)
    sampled, few = (Shard.build(store, np.asarray(each), test.labels[each]) for each in (rows, examples))
    pairs = positive_pairs(model, sampled.batches(run.config.evaluate.batch_size))
    classes = range(len(federation.dataset.classes))
    images = few.store.gather(few.rows)
    with torch.no_grad():
        probabilities = run.method.learner.probabilities(model(images).logits)
    attention = attention_maps(model, images)
    return Look(
        pairs=Pairs(pairs.features.cpu(), pairs.classes.cpu(), pairs.images.cpu()),
        means=class_means(pairs, len(classes)).cpu().numpy(),
        probabilities=probabilities.cpu().numpy(),
        evidence=evidence(model, images, classes).cpu().numpy(),
        grad_cam=grad_cam(model, images, classes).cpu().numpy(),
        attention=None if attention is None else attention.cpu().numpy(),
    )


def cosines(means: Floats) -> Floats:
    """Return the cosine of every pair of class means: (C, d) → (C, C), NaN for a class without a mean."""
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    found: Floats = np.clip(unit @ unit.T, -1, 1)
    return found


@dataclass(frozen=True)
class Embedding:
    """Points in the plane, one for each image and label of a sample."""

    points: Floats  # (n, 2)
    classes: NDArray[np.intp]  # (n,)
    labels: NDArray[np.intp]  # (n,), how many labels the point's image has


def embed(pairs: Pairs, most: int) -> Embedding | None:
    """Arrange at most `most` pairs by t-SNE with a fixed seed; None if there are too few."""
    from sklearn.manifold import TSNE

    kept = np.sort(numpy_rng(SEED, "t-SNE").permutation(len(pairs.classes))[:most])
    if len(kept) < FEWEST_POINTS:
        return None
    features = pairs.features.numpy()[kept].astype(np.float32)
    arrange = TSNE(
        perplexity=min(30.0, (len(kept) - 1) / 3), init="pca", random_state=derive_seed(SEED, "t-SNE") % 2**32
    )
    per_image = np.bincount(pairs.images.numpy())
    return Embedding(
        points=arrange.fit_transform(features),
        classes=pairs.classes.numpy()[kept],
        labels=per_image[pairs.images.numpy()[kept]],
    )
