"""Figures of a partition, safe for colour-blind readers: who holds which classes, how often each class occurs."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from fednca.base.files import write_atomic
from fednca.data.facts import all_zero_share, client_names, positives, train_counts
from fednca.data.federation import Federation

# Paul Tol's muted colours, distinguishable under every common colour blindness, and a dark grey. From the eleventh
# class on the colours repeat with hatching.
COLOURS = (
    *("#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE"),
    *("#882255", "#44AA99", "#999933", "#AA4499", "#555555"),
)
MAIN, LEFT_OUT, OTHER, QUIET = "#332288", "#88CCEE", "#DDDDDD", "#555555"
MOST_STACKED = 2 * len(COLOURS)
LONGEST_NAME = 26
STYLE: Any = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": "#E6E6E6",
    "hatch.linewidth": 1.2,
    "legend.frameon": False,
    "text.parse_math": False,  # a class name may hold a dollar sign
    "svg.hashsalt": "fednca",  # makes equal pictures equal files
}


def draw_partition(federation: Federation, folder: Path) -> list[Path]:
    """Draw each client's classes as stacked bars and as bubbles, and the classes of train and test, as PNG and SVG."""
    name, classes = federation.dataset.name, federation.dataset.classes
    train, test = federation.train.everything()[1], federation.dataset.test.labels
    held = train_counts(federation).sum(axis=0)
    with rc_context(STYLE):
        figures = {
            "clients-stacked": stacked_bars(federation),
            "clients-bubbles": bubbles(federation),
            "train-classes": class_bars(f"{name}: training images by class", classes, train, held),
            "test-classes": class_bars(f"{name}: test images by class", classes, test, positives(test)),
        }
        return [path for stem, figure in figures.items() for path in _save(figure, folder / stem)]


def stacked_bars(federation: Federation) -> Figure:
    """Draw one bar per client with a segment per class; beyond twenty classes the rare ones share a grey segment."""
    classes, clients = readable(federation.dataset.classes), readable(client_names(federation))
    segments, labels = group_tail(train_counts(federation), classes, MOST_STACKED)
    looks = [_look(i) for i in range(len(labels))]
    if len(classes) > MOST_STACKED:
        looks[-1] = {"facecolor": OTHER}
    slant = 0.5 * _inches(clients)  # the names are turned by 30 degrees
    figure, axes = _axes(max(6.5, 3.2 + 0.55 * len(clients)), max(4.2, 0.6 + 0.21 * len(labels)) + slant)
    tops = segments.cumsum(axis=1)
    for heights, top, look in zip(segments.T, tops.T, looks, strict=True):
        axes.bar(np.arange(len(clients)), heights, 0.8, top - heights, edgecolor="white", linewidth=0.5, **look)
    for k, rows in enumerate(federation.train.partition.clients):
        _write_above(axes, k, int(tops[k, -1]), f"{len(rows):,}")
    if any(len(name) > 3 for name in clients):
        axes.set_xticks(np.arange(len(clients)), clients, rotation=30, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(np.arange(len(clients)), clients)
    axes.set(xlabel="client", ylabel="labels (one image may have several)", xlim=(-0.6, len(clients) - 0.4))
    axes.set_title(
        f"{federation.dataset.name}: labels of each client's training images\n(number above a bar: the client's images)"
    )
    _count_axis(axes, int(tops.max(initial=0)))
    handles = [Patch(label=label, edgecolor="white", **look) for label, look in zip(labels, looks, strict=True)]
    # Reversed, so that the legend lists the classes in the order of a bar from top to bottom.
    figure.legend(handles=handles[::-1], loc="outside right upper")
    return figure


def bubbles(federation: Federation) -> Figure:
    """Draw a bubble per client and class, its area the number of images; a dot is an allowed class without images."""
    classes, clients = readable(federation.dataset.classes), readable(client_names(federation))
    counts = train_counts(federation)
    largest = max(1, int(counts.max(initial=0)))
    step = 0.42 if len(classes) <= 20 else 0.24  # inches between neighbouring classes and clients
    figure, axes = _axes(
        max(4.5, 1.9 + _inches(clients) + step * len(classes)), max(3.0, 1.0 + _inches(classes) + step * len(clients))
    )

    def draw(column: ArrayLike, row: ArrayLike, images: NDArray[np.intp], label: str = "") -> PathCollection:
        area = np.maximum(
            (72 * step) ** 2 * images / largest, 1.5
        )  # in square points; even a single image must be visible
        return axes.scatter(column, row, area, color=MAIN, alpha=0.8, linewidths=0, label=label)

    k, c = np.nonzero(counts)
    draw(c, k, counts[k, c])
    k, c = np.nonzero(federation.train.partition.classes & (counts == 0))
    axes.scatter(c, k, 4, color="#AAAAAA", linewidths=0)
    _class_axis(axes, classes)
    axes.set_yticks(np.arange(len(clients)), clients)
    axes.set(ylabel="client", ylim=(len(clients) - 0.3, -0.7))
    axes.set_title(f"{federation.dataset.name}: images by client and class\n(grey dot: class allowed, but no image)")
    axes.grid()
    examples = sorted({_round(largest * share) for share in (0.1, 0.4, 1)})
    handles = [draw([], [], np.array([n]), f"{n:,}") for n in examples]
    # The spacing is in units of the font size, and leaves room for the largest bubble.
    spacing = {"labelspacing": 8 * step - 0.9, "handletextpad": 1.3}
    figure.legend(handles=handles, title="images", loc="outside right upper", **spacing)
    return figure


def class_bars(title: str, classes: Sequence[str], labels: NDArray[np.int8], held: NDArray[np.intp]) -> Figure:
    """Draw how many images show each class, with those that no client holds in a second colour; held: (C,)."""
    names, counts, places = readable(classes), positives(labels), np.arange(len(classes))
    wide = 0.42 if len(classes) <= 20 else 0.2
    figure, axes = _axes(max(5.0, 1.2 + wide * len(classes)), 2.8 + _inches(names))
    axes.bar(places, held, 0.75, color=MAIN, label="held by a client")
    if (counts > held).any():
        axes.bar(places, counts - held, 0.75, held, color=LEFT_OUT, label="held by no client")
        figure.legend(loc="outside right upper")
    for place, count in enumerate(counts if len(classes) <= 20 else ()):
        _write_above(axes, place, int(count), f"{count:,}")
    _class_axis(axes, names)
    axes.set_ylabel("images")
    share = all_zero_share(labels)
    without = f", {share:.0%} without any class" if share > 0 else ""
    axes.set_title(f"{title}\n({len(labels):,} images{without})")
    _count_axis(axes, int(counts.max(initial=0)))
    return figure


def group_tail(counts: NDArray[np.intp], names: Sequence[str], most: int) -> tuple[NDArray[np.intp], list[str]]:
    """Keep at most `most` columns: the most frequent in their order, then one with the sum of all others."""
    if len(names) <= most:
        return counts, list(names)
    kept = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: most - 1])
    others = counts.sum(axis=1) - counts[:, kept].sum(axis=1)
    label = f"other {len(names) - len(kept)} classes"
    return np.column_stack([counts[:, kept], others]), [*(names[c] for c in kept), label]


def readable(names: Sequence[str]) -> list[str]:
    """Make names readable: spaces for underscores, long names cut.

    >>> readable(["Pleural_Thickening"])
    ['Pleural Thickening']
    """
    plain = [name.replace("_", " ").strip() for name in names]
    return [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in plain]


def _look(number: int) -> dict[str, Any]:
    hatched = {"hatch": "////"} if number >= len(COLOURS) else {}
    return {"facecolor": COLOURS[number % len(COLOURS)], **hatched}


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure of this size in inches, without pyplot, which would keep it in memory."""
    figure = Figure((width, height), layout="constrained")
    return figure, figure.add_subplot()


def _inches(names: Sequence[str]) -> float:
    """Estimate the printed length of the longest name."""
    return 0.075 * max(map(len, names))


def _class_axis(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(np.arange(len(names)), names, rotation=90)
    axes.set_xlim(-0.7, len(names) - 0.3)


def _count_axis(axes: Axes, highest: int) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.07 * max(1, highest))  # room for the numbers above the bars
    axes.grid(axis="y")


def _write_above(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(text, (place, height), (0, 2), textcoords="offset points", ha="center", color=QUIET, fontsize=8)


def _round(value: float) -> int:
    """Round down to one leading digit.

    >>> _round(4321)
    4000
    """
    digits: int = 10 ** (len(str(max(1, int(value)))) - 1)
    return max(1, int(value) // digits * digits)


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = []
    for kind, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
        picture = BytesIO()
        figure.savefig(picture, format=kind, **options)
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        write_atomic(paths[-1], picture.getvalue())
    return paths
