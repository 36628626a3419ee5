"""The section on features: how well they separate by class and by label count, and how class means lie."""

import math
from collections.abc import Mapping
from itertools import product

from plan import ABLATED, COMPONENTS, DRAWS, SEEDS, WITH_FEATURES
from seed_tables import NOT_RUN, markdown, number
from study import Record, Study

SILHOUETTES = ("class", "class, one label", "label count", "class, absent")


def kept_features(study: Study, setting: str) -> dict[str, Record]:
    """Return the component rows of a setting with recorded test features, by name."""
    runs = {name: study.over_seeds(setting, COMPONENTS[name]).get(SEEDS[0]) for name in WITH_FEATURES}
    return {name: record for name, record in runs.items() if record is not None and record["features"]}


def ideal_cosine(classes: int) -> float:
    """Return the cosine between any two corners of a simplex, seen from its centre."""
    return -1 / (classes - 1)


def distance_to_ideal(cosines: list[list[float]]) -> float | None:
    """Return the mean distance of the known cosines between different classes from a simplex's cosine.

    Their plain mean would say nothing: for vectors of one length, centred on their mean, it always equals the ideal.
    """
    ideal = ideal_cosine(len(cosines))
    return mean([abs(value - ideal) for value in between_classes(cosines)])


def between_classes(cosines: list[list[float]]) -> list[float]:
    """Return the known cosines between different classes."""
    return [value for i, row in enumerate(cosines) for j, value in enumerate(row) if i != j and not math.isnan(value)]


def mean(values: list[float]) -> float | None:
    """Return the mean of values, or None if there are none."""
    return sum(values) / len(values) if values else None


def feature_section(study: Study, figures: Mapping[str, str]) -> str:
    """Show maps and class means; figures: links by `features-SETTING` and `cosines-SETTING`."""
    text = f"""\
## Features

The paper claims that the features of a linear head (FC) cluster by the number of labels and those of LADM by class.
Test features of the final models (draw taken where no other is named, seed {SEEDS[0]}): an image counts once for each
of its labels, with its feature for that label where the model has one per class. LADM reads that feature with the
label's own query, so that the query, and not the image alone, may part its classes. Maps are t-SNE on cosine
distances; silhouettes (-1 to 1, higher: better parted) are those of the features themselves; the last one is that of
features for classes that the image does not show, which little but the query can part (earlier runs did not keep it).
Cosines are those between class means: as they are (the paper's "pairwise cosine similarity"), and, in the figure,
around their common mean, where all are -1/(C-1) for a simplex of C classes."""
    parts = [text]
    for setting in ABLATED:
        shown = [figures[name] for name in (f"features-{setting}", f"cosines-{setting}") if name in figures]
        parts += [f"### {setting}: features", *shown, silhouettes_table(study, setting)]
    return "\n\n".join(parts)


def silhouettes_table(study: Study, setting: str) -> str:
    """Show silhouettes and the mean cosine of class means, also on other draws if recorded."""
    found = kept_features(study, setting)
    header = [
        "components",
        *(f"silhouette: {name}" for name in SILHOUETTES),
        "mean cosine as they are",
        "mean distance to a simplex's around their mean",
    ]
    rows = [
        [name, *(feature_cells(found[name]) if name in found else [NOT_RUN] * (len(header) - 1))]
        for name in WITH_FEATURES
    ]
    for draw, name in product(DRAWS, WITH_FEATURES):
        record = None if draw == study.chosen[setting] else study.find(setting, COMPONENTS[name], draw, SEEDS[0])
        rows += [[f"{name}, draw {draw}", *feature_cells(record)]] if record and record["features"] else []
    return markdown(header, rows) if found else NOT_RUN


def feature_cells(record: Record) -> list[str]:
    """Write the silhouettes and cosines of a run."""
    features = record["features"]
    scores = [number(features["silhouette"].get(name), 3) for name in SILHOUETTES]
    raw = mean(between_classes(features["raw_cosines"]))
    return [*scores, *(number(value, 3) for value in (raw, distance_to_ideal(features["mean_cosines"])))]
