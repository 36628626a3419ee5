"""The record of a run: all that docs/results.md needs of it, small enough to keep in the repository."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plan import Entry, chosen_draw

from fednca.base.devices import pick_device
from fednca.base.files import explain_write, write_atomic
from fednca.data.distances import cooccurrence_distance, label_distance, missing_classes
from fednca.data.partition import summary
from fednca.engines.workplace import build_store
from fednca.measures.collapse import Pairs, class_means, positive_pairs
from fednca.report.comparison import COLUMNS, value_of
from fednca.runs import Run
from fednca.runs.folder import read_json

RECORDS = Path(__file__).parent / "records"
DIGITS = 5
BATCH = 256
AGAIN = "to be run again"  # in the note of a record that is to be replaced


def read_records(folder: Path = RECORDS) -> dict[Path, dict[str, Any]]:
    """Read all records by their path below the folder."""
    paths = sorted(folder.rglob("*.json"))
    return {path.relative_to(folder): read_json(path) for path in paths}


def write_record(entry: Entry, run: Run, commit: str, folder: Path = RECORDS) -> None:
    """Write the record of a finished run; the map of its features, which is large, only on the chosen draw."""
    path = folder / entry.path
    with explain_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    mapped = entry.keeps_features and chosen_draw(entry.setting, read_records(folder)) in (None, entry.draw)
    text = json.dumps(make_record(entry, run, commit, mapped=mapped), ensure_ascii=False)
    write_atomic(path, (text.replace('], "', '],\n"').replace('}, "', '},\n"') + "\n").encode())


def make_record(entry: Entry, run: Run, commit: str, *, mapped: bool = True) -> dict[str, Any]:
    """Collect the results of a finished run and what is needed to repeat it."""
    history, environment = run.history, run.environment
    judged = [record for record in history if "test" in record]
    curves = {
        split: {metric: [rounded(value_of(record, metric, split)) for record in judged] for metric in COLUMNS}
        for split in ("val", "test")
    }
    return {
        "row": entry.row,
        "setting": entry.setting,
        "draw": entry.draw,
        "seed": entry.seed,
        "commit": commit,
        "gpu": environment["gpu"],
        "python": environment["python"],
        "packages": environment["packages"],
        "note": environment["note"],
        "seconds": rounded(sum(record["seconds"] for record in history)),
        "classes": environment["classes"],
        "partition": describe_partition(run),
        "results": rounded(run.results),
        "curves": {"round": [record["round"] for record in judged]} | curves,
        "losses": rounded(history[-1]["losses"]),
        "features": describe_features(run, mapped=mapped) if entry.keeps_features else None,
        "config": run.config.model_dump(mode="json", exclude_none=True),
    }


def rounded(value: Any) -> Any:  # noqa: ANN401 (whatever JSON may hold)
    """Round every number inside a value to a few digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def describe_partition(run: Run) -> dict[str, Any]:
    """Return the sizes of the clients and how different they are."""
    share = run.federation.train
    counts = summary(share.partition, share.split.labels[share.rows])
    labels = [share.client(k)[1] for k in range(len(counts))]
    distances = {
        "label_distance": label_distance(counts),
        "missing_classes": missing_classes(counts),
        "cooccurrence_distance": cooccurrence_distance(labels),
    }
    known = {name: None if np.isnan(value) else rounded(value) for name, value in distances.items()}
    left_out = sum(map(len, share.partition.left_out.values()))
    return known | {"images": [len(own) for own in labels], "left_out": left_out}


def describe_features(run: Run, *, mapped: bool) -> dict[str, Any]:
    """Return silhouettes and class means of the final model's test features, and with `mapped` a t-SNE map.

    An image counts once for each of its labels, as in `fednca.measures.collapse`; silhouettes are those of cosine
    distances between the features themselves: of all, of those of images with one label, and of as many features for
    classes that an image does not show, which little but a class's own query can part.
    """
    device, test = pick_device(run.config.device), run.federation.dataset.test
    store, model = build_store(run.config, test.images, device), run.model().to(device)
    rows = torch.arange(len(test.labels), device=device)

    def pairs_of(labels: NDArray[np.int8]) -> Pairs:
        marks = torch.as_tensor(labels, device=device)
        parts = zip(torch.split(rows, BATCH), torch.split(marks, BATCH), strict=True)
        return positive_pairs(model, ((store.gather(own), marked) for own, marked in parts))

    pairs, absent = pairs_of(test.labels), pairs_of(absent_labels(test.labels))
    features, classes = pairs.features.cpu().numpy(), pairs.classes.cpu().numpy()
    counts = (test.labels == 1).sum(axis=1)[pairs.images.cpu().numpy()]
    means = class_means(pairs, test.labels.shape[1]).cpu()
    raw, centred = (torch.nn.functional.normalize(each, dim=1) for each in (means, means - means.nanmean(dim=0)))
    single = counts == 1
    return (map_of(features, classes, counts) if mapped else {}) | {
        "silhouette": {
            "class": silhouette(features, classes),
            "class, one label": silhouette(features[single], classes[single]),
            "label count": silhouette(features, counts),
            "class, absent": silhouette(absent.features.cpu().numpy(), absent.classes.cpu().numpy()),
        },
        "mean_cosines": rounded((centred @ centred.T).tolist()),  # about the mean of all classes
        "raw_cosines": rounded((raw @ raw.T).tolist()),
    }


def map_of(
    features: NDArray[np.float32], classes: NDArray[np.int64], counts: NDArray[np.int64]
) -> dict[str, list[Any]]:
    """Return the t-SNE map of features, with their classes and label counts as colours."""
    from sklearn.manifold import TSNE

    places = TSNE(metric="cosine", init="random", random_state=0).fit_transform(features)
    return {
        "places": [[round(float(x), 1), round(float(y), 1)] for x, y in places],
        "classes": classes.tolist(),
        "label_counts": counts.tolist(),
    }


def absent_labels(labels: NDArray[np.int8]) -> NDArray[np.int8]:
    """Mark at random, for each image, as many absent classes as it has labels.

    >>> absent_labels(np.array([[1, 0], [0, 1]], np.int8)).tolist()
    [[0, 1], [1, 0]]
    """
    order = np.random.default_rng(0).random(labels.shape)
    order[labels != 0] = 2  # after all others
    places = order.argsort(axis=1).argsort(axis=1)
    marked: NDArray[np.bool_] = (places < (labels == 1).sum(axis=1, keepdims=True)) & (labels == 0)
    return marked.astype(np.int8)


def silhouette(features: NDArray[np.float64], groups: NDArray[np.integer]) -> float:
    """Return how well groups are separated, from -1 to 1."""
    from sklearn.metrics import silhouette_score

    return round(float(silhouette_score(features, groups, metric="cosine")), DIGITS)
