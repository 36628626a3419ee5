"""Metrics of a trained model on new labelled images, with confidence intervals, by class and by group."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.config import validate
from fednca.data.images import ImageError
from fednca.data.sources import folder
from fednca.runs import Run
from fednca.use.bootstrap import Resampling, Scored, intervals
from fednca.use.model import TrainedModel
from fednca.use.reading import read_batches

MOST_GROUPS = 50  # most values of the --by column
MOST_NAMED = 5  # most classes that an error names
COLUMNS = ("image_column", "label_column", "split_column", "group_column", "site_column")
TOLD = ("label_column", "separator", "group_column")  # options of the table that have a flag
MEANS = ("macro_auc", "micro_auc", "macro_f1", "micro_f1", "mean_ap")


@dataclass(frozen=True, eq=False)
class Labelled:
    """New images and their labels.

    labels: (N, C), in the model's order of classes; groups: (N,), if the table names any; by: (N,), the values of the
    column given by --by.
    """

    paths: tuple[Path, ...]
    labels: NDArray[np.int8]
    groups: NDArray[np.int64] | None
    by: NDArray[np.str_] | None


@dataclass(frozen=True)
class Reading:
    """How to read the table of new images."""

    table: str | None = None
    label_column: str | None = None
    separator: str | None = None
    group_column: str | None = None
    split: str | None = None
    by: str | None = None
    ignore_extra: bool = False


def read_labelled(
    root: Path, classes: tuple[str, ...], how: Reading, trained: folder.Options | None = None
) -> Labelled:
    """Read a folder of images with its table, by the training table's columns if the new table has them.

    Labels of classes that the table lacks are unknown.
    """
    table = folder.read_table(folder.find_table(folder.Options(table=how.table), root))
    told = {name: value for name in TOLD if (value := getattr(how, name)) is not None}
    options = folder.Options(**alike(table, root, trained or folder.Options()) | told, classes=list(classes))
    image = folder.find_column(table, "image_column", options.image_column, folder.IMAGE) or table.header[0]
    split = folder.find_column(table, "split_column", None, (options.split_column.lower(),))
    group = folder.find_column(table, "group_column", options.group_column, folder.GROUP)
    site = folder.find_column(table, "site_column", options.site_column, folder.SITE)
    by = folder.find_column(table, "--by", how.by, ())
    if not how.ignore_extra:
        chosen = trained is not None and trained.classes is not None
        refuse_extra(table, options, {image, split, group, site, by}, chosen=chosen)
    _, labels = folder.read_labels(table, options, {image, split, group, site})
    paths = folder.image_paths(table, image, folder.find_images(options, root))
    groups = None if group is None else folder.numbered(table, group)[1]
    values = None if by is None else np.array([cell or "(empty)" for cell in table.column(by)])
    rows = rows_of_split(table, split, how.split)
    if values is not None and (found := len(np.unique(values[rows]))) > MOST_GROUPS:
        raise FedncaError(f"--by: column '{how.by}' has {found} values; choose one with at most {MOST_GROUPS}")
    return Labelled(
        tuple(paths[row] for row in rows),
        labels[rows],
        None if groups is None else groups[rows],
        None if values is None else values[rows],
    )


def trained_by(run: Run) -> folder.Options:
    """Return how the run's training table was read, or the defaults if it had none."""
    data = run.config.data
    return validate(folder.Options, data.options if data.name == "folder" else {}, "data.options")


def alike(table: folder.Table, root: Path, trained: folder.Options) -> dict[str, str]:
    """Return those reading options of the training table that also fit the new one."""
    found = {name: column for name in COLUMNS if (column := getattr(trained, name)) in table.header}
    if trained.image_folder is not None and (root / trained.image_folder).is_dir():
        found["image_folder"] = trained.image_folder
    return found | {"separator": trained.separator}


def refuse_extra(table: folder.Table, options: folder.Options, taken: set[str | None], *, chosen: bool) -> None:
    """Refuse labels that are not among the model's classes, which the options name.

    chosen: training itself used only some classes of its table, by --data.classes.
    """
    label = folder.find_column(table, "label_column", options.label_column, ())
    if label is None:
        named = {name for name in table.header if name and name not in taken}
    else:
        named = {name.strip() for cell in table.column(label) for name in cell.split(options.separator)} - {""}
    if extra := sorted(named - set(options.classes or ())):
        listed = ", ".join(extra[:MOST_NAMED]) + (", …" if len(extra) > MOST_NAMED else "")
        way_out = "rename them to match its classes, or ignore them with --ignore-extra"
        if chosen:
            way_out = "training, too, used only the classes in --data.classes; ignore the others with --ignore-extra"
        raise FedncaError(f"table '{table.path}' has {listed}, and the model has no such class; {way_out}")


def rows_of_split(table: folder.Table, column: str | None, wanted: str | None) -> NDArray[np.intp]:
    """Return the rows of one split, or all rows."""
    if wanted is None:
        return np.arange(len(table.rows))
    if column is None:
        raise FedncaError(f"table '{table.path}' has no column 'split' to find '{wanted}' in; leave --split out")
    rows = np.flatnonzero(np.array(folder.parts_of(table, column)) == wanted)
    if not len(rows):
        raise FedncaError(f"table '{table.path}' has no rows of split '{wanted}'; choose another --split")
    return rows


def evaluate(
    model: TrainedModel,
    data: Labelled,
    threshold: str,
    how: Resampling,
    batch_size: int = 64,
    advance: Callable[[int], None] = lambda images: None,
) -> tuple[dict[str, Any], list[ImageError]]:
    """Score new images; return their metrics, ready for JSON, and the images that could not be read.

    advance: called with the number of images done since the last call.
    """
    thresholds = model.thresholds_by(threshold).numpy()
    scores, rows, failed = [], list[int](), list[ImageError]()
    for batch in read_batches(data.paths, model.size, batch_size):
        scores.append(model.score(batch.pixels).numpy())
        rows += batch.rows
        failed += batch.failed.values()
        advance(len(batch.rows) + len(batch.failed))
    if not rows:
        raise FedncaError(f"none of the {len(data.paths)} images could be read; the first problem: {failed[0]}")
    kept = np.array(rows)
    groups = None if data.groups is None else data.groups[kept]
    scored = Scored(np.concatenate(scores), data.labels[kept], thresholds, groups)
    facts = judge(scored, model.classes, how)
    if data.by is not None:
        facts["by"] = judge_groups(scored, data.by[kept], model.classes, how)
    return facts, failed


def judge_groups(scored: Scored, values: NDArray[np.str_], classes: tuple[str, ...], how: Resampling) -> dict[str, Any]:
    """Return the metrics of the images with each value of a column."""
    names = np.unique(values)
    return {str(name): judge(scored.take(np.flatnonzero(values == name)), classes, how) for name in names}


def judge(scored: Scored, classes: tuple[str, ...], how: Resampling) -> dict[str, Any]:
    """Return metrics with their intervals, overall and by class; None is an undefined one."""
    value, (low, high) = scored.metrics(), intervals(scored, how)
    facts = [each.as_dict() for each in (value, low, high)]

    def bounded(name: str, c: int | None = None) -> dict[str, float | None]:
        numbers = [fact[name] if c is None else fact[name][c] for fact in facts]
        return dict(zip(("value", "low", "high"), numbers, strict=True))

    return {
        "images": len(scored.labels),
        "groups": None if scored.groups is None else len(np.unique(scored.groups)),
        "metrics": {name: bounded(name) for name in MEANS},
        "classes": {
            name: {
                "positives": int((scored.labels[:, c] == 1).sum()),
                "known": int((scored.labels[:, c] >= 0).sum()),
                "threshold": float(scored.thresholds[c]),
                **{kind: bounded(f"class_{kind}", c) for kind in ("auc", "f1", "ap")},
            }
            for c, name in enumerate(classes)
        },
    }
