"""Figures of what trained models see in test images, several runs side by side."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from fednca.base.errors import FedncaError
from fednca.base.files import explain_write
from fednca.data.federation import Federation
from fednca.models.overlay import overlay
from fednca.report.facts import load_federations
from fednca.report.figures import COLOURS, QUIET, STYLE, _save, draw_partition, readable
from fednca.report.groups import group_runs, setting
from fednca.report.samples import (
    Embedding,
    Floats,
    Look,
    checkpoint_of,
    choose_examples,
    cosines,
    embed,
    look,
    pixels,
    sample_rows,
)
from fednca.runs import Run

POINTS = 1000  # most points in a t-SNE map
EXAMPLES, SHOWN = 4, 18  # images with class maps, and images in the plain grid
MOST_ACROSS = 4  # panels in a row
MARKERS = "osD^vPX*<>"
DIVERGING = colormaps["RdBu_r"].with_extremes(bad="#DDDDDD")
SIDE = 160  # pixels; smaller images are enlarged, so that maps on them look smooth


def draw_pictures(runs: Sequence[Run], folder: Path, *, images: int = 2000) -> list[Path]:
    """Draw t-SNE maps, cosines, class maps, examples and the partition of runs on the same data, as PNG and SVG.

    images: take features of at most this many test images.
    """
    federation, panels = load_panels(runs)
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    test, classes = federation.dataset.test, readable(federation.dataset.classes)
    rows, shown = sample_rows(federation, images), choose_examples(test.labels, SHOWN)
    examples = shown[:EXAMPLES]
    looks = {label: look(run, federation, rows, examples) for label, run in panels.items()}
    planes = {label: plane for label, seen in looks.items() if (plane := embed(seen.pairs, POINTS))}
    few, many = ([np.flatnonzero(row == 1).tolist() for row in test.labels[each]] for each in (examples, shown))
    raw = pixels(test.images, examples)
    with rc_context(STYLE):
        figures = {"cosines": cosine_panels({label: cosines(seen.means) for label, seen in looks.items()}, classes)}
        if any(few):
            figures["grad-cam"] = grad_cam_panels(raw, few, looks, classes)
        figures["examples"] = example_grid(pixels(test.images, shown), many, classes)
        if planes:
            figures |= {"tsne-classes": class_points(planes, classes), "tsne-labels": label_points(planes)}
        for label, seen in looks.items():
            if seen.attention is not None and any(few):
                figures[f"attention-{_slug(label)}"] = attention_panels(label, raw, few, seen.attention, classes)
        paths = [path for stem, figure in figures.items() for path in _save(figure, folder / stem)]
    return paths + draw_partition(federation, folder)


def load_panels(runs: Sequence[Run]) -> tuple[Federation, dict[str, Run]]:
    """Return the data and the runs to draw, by label: one run per method, or every seed if there is one method."""
    groups = group_runs(runs)
    for group in groups:
        if setting(group) != setting(groups[0]):
            raise FedncaError(
                f"'{group.run.folder}' was trained on other images than '{groups[0].run.folder}'; "
                "give them to two separate commands"
            )
    if len(groups) == 1 and len(groups[0].runs) > 1:
        found = {f"{groups[0].label}, seed {run.config.seed}": run for run in groups[0].runs}
    else:
        found = {group.label: group.run for group in groups}
    for run in found.values():
        if checkpoint_of(run) is None:
            raise FedncaError(f"'{run.folder}' has no checkpoint yet; wait for its first round")
    (federation,) = load_federations(groups).values()
    if isinstance(federation, str):
        raise FedncaError(federation)
    return federation, {label if run.finished else f"{label} (not finished)": run for label, run in found.items()}


def class_points(planes: Mapping[str, Embedding], classes: Sequence[str]) -> Figure:
    """Draw every point with the colour and marker of its class."""
    signs = {c: _sign(c) | {"label": name} for c, name in enumerate(classes)}
    return _points({label: (plane, plane.classes) for label, plane in planes.items()}, signs, "class")


def label_points(planes: Mapping[str, Embedding]) -> Figure:
    """Draw every point in a colour for the number of labels of its image."""
    most = max(int(plane.labels.max()) for plane in planes.values())
    shades = enumerate(colormaps["viridis"](np.linspace(0, 0.92, most)))
    signs = {n + 1: {"color": shade, "marker": MARKERS[n % 10], "label": str(n + 1)} for n, shade in shades}
    points = {label: (plane, plane.labels) for label, plane in planes.items()}
    return _points(points, signs, "labels of\nthe image", alpha=0.75)


def cosine_panels(found: Mapping[str, Floats], classes: Sequence[str]) -> Figure:
    """Draw the cosine of every pair of class means, with numbers for few classes; the title gives their mean."""
    side = 1.2 + max(2.2, 0.3 * len(classes) if len(classes) <= 20 else 0.13 * len(classes))
    figure, panels = _panels(len(found), side, side + 0.3)
    off_diagonal = ~np.eye(len(classes), dtype=bool)
    for axes, (label, values) in zip(panels, found.items(), strict=True):
        axes.imshow(values, DIVERGING, vmin=-1, vmax=1)
        pairs = values[off_diagonal & ~np.isnan(values)]
        mean = f"{pairs.mean():z.2f}" if len(pairs) else "not defined"
        axes.set_title(f"{label}\nmean over pairs {mean}", fontsize=9)
        axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=9 if len(classes) <= 20 else 5)
        axes.set_yticks(range(len(classes)), classes, fontsize=9 if len(classes) <= 20 else 5)
        axes.spines[:].set_visible(False)
        for r, c in np.ndindex(values.shape) if len(classes) <= 10 else ():
            if not math.isnan(values[r, c]):
                dark = abs(values[r, c]) > 0.6
                axes.text(
                    c, r, f"{values[r, c]:z.1f}", ha="center", va="center", fontsize=7, color="w" if dark else "k"
                )
    figure.colorbar(
        ScalarMappable(Normalize(-1, 1), DIVERGING),
        ax=panels,
        shrink=0.7,
        label="cosine between the mean features of two classes\n(1: same direction, -1: opposite)",
    )
    return figure


def grad_cam_panels(
    raw: NDArray[np.uint8], labels: Sequence[Sequence[int]], looks: Mapping[str, Look], classes: Sequence[str]
) -> Figure:
    """Draw, for each example and each of its classes, where every run's logit comes from (Grad-CAM)."""
    maps = {label: seen.grad_cam for label, seen in looks.items()}
    below = {label: seen.probabilities for label, seen in looks.items()}
    return _map_grid(
        "Grad-CAM: where each class is found\n(bright: strong; below: probability)", raw, labels, maps, classes, below
    )


def attention_panels(
    label: str, raw: NDArray[np.uint8], labels: Sequence[Sequence[int]], attention: Floats, classes: Sequence[str]
) -> Figure:
    """Draw, for each example and each of its classes, where each attention head looks; (E, heads, C, H', W')."""
    maps = {f"head {n + 1}": attention[:, n] for n in range(attention.shape[1])}
    return _map_grid(
        f"{label}: attention by class\nand attention head (bright: strong)", raw, labels, maps, classes, together=True
    )


def example_grid(raw: NDArray[np.uint8], labels: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Show images with the names of their classes."""
    across = min(6, len(raw))
    down = math.ceil(len(raw) / across)
    figure = Figure((1.45 * across, 0.3 + 1.75 * down), layout="constrained")
    for n, (image, own) in enumerate(zip(raw, labels, strict=True)):
        axes = figure.add_subplot(down, across, n + 1)
        _image(axes, enlarge(image))
        axes.set_title("\n".join(classes[c] for c in own) or "no class", fontsize=8, pad=3)
    figure.suptitle("test images and their labels", x=0.01, ha="left")
    return figure


def enlarge(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Repeat the pixels of a small image (H, W, 3) until it is at least `SIDE` wide."""
    times = max(1, math.ceil(SIDE / image.shape[1]))
    return image.repeat(times, axis=0).repeat(times, axis=1)


def _map_grid(
    title: str,
    raw: NDArray[np.uint8],
    labels: Sequence[Sequence[int]],
    maps: Mapping[str, Floats],
    classes: Sequence[str],
    below: Mapping[str, Floats] | None = None,
    *,
    together: bool = False,
) -> Figure:
    """Draw a row for each example and each of its classes: the image with the class's name, then a map per column.

    maps: (E, C, H', W') each; below: numbers (E, C) to write under them; together: a row's maps share one scale.
    """
    rows = [(e, c) for e, own in enumerate(labels) for c in own]
    figure = Figure((0.4 + 1.45 * (1 + len(maps)), 0.6 + 1.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 1 + len(maps), squeeze=False)
    for (first, *others), (e, c) in zip(grid, rows, strict=True):
        picture = enlarge(raw[e])
        _image(first, picture)
        first.set_ylabel(classes[c], fontsize=8)
        most = max(found[e, c].max() for found in maps.values())
        for axes, (name, found) in zip(others, maps.items(), strict=True):
            heat = found[e, c].astype(np.float32)
            _image(axes, overlay(picture, heat / ((most if together else heat.max()) or 1)))
            if below is not None:
                axes.set_xlabel(f"{below[name][e, c]:.2f}", fontsize=8, color=QUIET, labelpad=1)
    for axes, name in zip(grid[0], ["image", *maps], strict=True):
        axes.set_title("\n".join(wrap(name, 20)), fontsize=8, loc="center")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _panels(number: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make panels of this size in inches, a few in a row."""
    across = min(number, MOST_ACROSS)
    down = math.ceil(number / across)
    figure = Figure((width * across + 1.2, height * down + 0.3), layout="constrained")
    return figure, [figure.add_subplot(down, across, n + 1) for n in range(number)]


def _points(
    planes: Mapping[str, tuple[Embedding, NDArray[np.intp]]],
    signs: Mapping[int, dict[str, Any]],
    title: str,
    alpha: float | None = None,
) -> Figure:
    """Draw t-SNE maps, each point with the sign of its number; signs: colour, marker and label by number."""
    figure, panels = _panels(len(planes), 3.3, 3.5)
    for axes, (label, (plane, numbers)) in zip(panels, planes.items(), strict=True):
        for number, sign in signs.items():
            own = plane.points[numbers == number]
            axes.scatter(own[:, 0], own[:, 1], 12, linewidths=0, alpha=alpha, **sign)
        axes.set_title(label, fontsize=9)
        axes.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")  # the axes of t-SNE have no meaning
        axes.spines[:].set(visible=True, color="#CCCCCC")
    handles = [Line2D([], [], linestyle="", markersize=5, **sign) for sign in signs.values()]
    columns = math.ceil(len(signs) / 20)
    figure.legend(handles=handles, loc="outside right upper", ncols=columns, title=title, alignment="left")
    figure.suptitle(
        "t-SNE of test features: near points are similar\n(one point for each image and label)", x=0.01, ha="left"
    )
    return figure


def _image(axes: Axes, picture: NDArray[np.uint8]) -> None:
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _sign(number: int) -> dict[str, Any]:
    """Return colour and marker of a class, different for any two of a hundred classes."""
    return {"color": COLOURS[number % 10], "marker": MARKERS[(number + number // 10) % 10]}


def _slug(label: str) -> str:
    """Return a label in a form that fits a file name.

    >>> _slug("fednca-ml: tau=0.5")
    'fednca-ml-tau-0.5'
    """
    return re.sub(r"[^\w.-]+", "-", label).strip("-")
