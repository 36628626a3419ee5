"""The figures of the page: learning curves, gains, feature maps and cosines of class means."""

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from features import distance_to_ideal, ideal_cosine, kept_features
from gains import AGAINST, GAINED, Gain, gains
from grid import HELPING as ON_DIGITS
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from plan import ABLATED, GRID, SETTINGS, TABLE, WITH_FEATURES
from study import METRICS, Record, Study

from fednca.report.figures import COLOURS, QUIET, STYLE, readable

OWN_STYLE = STYLE | {"svg.fonttype": "none"}
# FedAvg in grey, FedNCA-ML in red and wine, the rest as far from these as possible.
ORDER = (9, 0, 5, 2, 3, 4, 7, 6, 1)
COLOUR = dict(zip(TABLE, (COLOURS[place] for place in ORDER), strict=True))
COLOUR |= {
    row: COLOURS[place] for row, place in zip(ON_DIGITS[2:], (1, 6, 2, 3), strict=True)
}  # never shown with the others
FOREMOST = ("fedavg", "fednca-ml", "fednca-ml:variant=released")
MARKERS = dict(zip(SETTINGS, "osD^", strict=True)) | dict(zip(GRID, "osD^vP", strict=True))
CURVES = (
    ("val", "macro_f1", "validation macro-F1"),
    ("test", "macro_f1_calibrated", "test macro-F1 cal."),
    ("test", "macro_auc", "test macro-AUC"),
)
RASTER_DPI = 130  # points of maps are rasterised: as vectors they would take megabytes


def draw_all(study: Study) -> dict[str, Figure]:
    """Draw every figure that has data, by name."""
    with rc_context(OWN_STYLE):
        return dict(_draw_all(study))


def _draw_all(study: Study) -> Iterator[tuple[str, Figure]]:
    for setting in SETTINGS:
        runs = {row: found for row in TABLE if (found := study.over_seeds(setting, row))}
        if runs:
            yield f"curves-{setting}", curves(setting, {row: list(found.values()) for row, found in runs.items()})
    for name, gained in {"gains": gains(study), "gains-digits": gains(study, GRID, ON_DIGITS)}.items():
        if shown := list(gained):
            yield name, gain_panels(shown)
    for setting in ABLATED:
        kept = kept_features(study, setting)
        if kept:
            yield f"features-{setting}", feature_maps(setting, kept)
            yield f"cosines-{setting}", cosine_maps(setting, kept)


def picture_of(figure: Figure) -> bytes:
    """Return a figure as SVG; equal figures give equal bytes with the same matplotlib."""
    picture = BytesIO()
    with rc_context(OWN_STYLE):
        figure.savefig(picture, format="svg", dpi=RASTER_DPI, metadata={"Date": None, "Creator": None})
    return picture.getvalue()


def shown_name(row: str) -> str:
    """Write a row's name for a legend.

    >>> shown_name("fednca-ml:variant=released")
    'fednca-ml released'
    """
    return row.replace(":variant=", " ")


def curves(setting: str, runs: Mapping[str, Sequence[Record]]) -> Figure:
    """Draw metrics over rounds: the mean over seeds as a line, the range over seeds as a band.

    A metric that some records lack is left out: older ones have no calibrated F1 by round.
    """
    records = [record for own in runs.values() for record in own]
    shown = [each for each in CURVES if all(each[1] in record["curves"][each[0]] for record in records)]
    figure = Figure((1.9 + 3.8 * len(shown), 3.8), layout="constrained")
    panels = figure.subplots(1, len(shown))
    for axes, (split, metric, name) in zip(panels, shown, strict=True):
        for row, own in runs.items():
            values = 100 * np.array([record["curves"][split][metric] for record in own], dtype=float)  # (S, R)
            _band(axes, row, own[0]["curves"]["round"], values)
        axes.set(xlabel="round", ylabel="%", ylim=(_floor(runs, split, metric), None))
        axes.set_title(f"{setting}: {name}")
        axes.grid()
    handles = [_line(row, shown_name(row) + _seeds(len(own))) for row, own in runs.items()]
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def _floor(runs: Mapping[str, Sequence[Record]], split: str, metric: str) -> float | None:
    """Return the lowest value after the first tenth of rounds: the climb from chance would squeeze all else."""
    known = [record["curves"][split][metric] for records in runs.values() for record in records]
    late = np.array([value for values in known for value in values[len(values) // 10 :]], dtype=float)
    return None if np.isnan(late).all() else 100 * float(np.nanmin(late))


def _band(axes: Axes, row: str, rounds: Sequence[int], values: NDArray[np.float64]) -> None:
    above = 3 if row in FOREMOST else 2
    axes.fill_between(
        rounds, values.min(axis=0), values.max(axis=0), color=COLOUR[row], alpha=0.15, linewidth=0, zorder=above - 1
    )
    axes.plot(rounds, values.mean(axis=0), **_look(row), zorder=above)


def _look(row: str) -> dict[str, Any]:
    return {
        "color": COLOUR[row],
        "linewidth": 1.8 if row in FOREMOST else 1.1,
        "linestyle": "--" if row == "centralized" else "-",
    }


def _line(row: str, label: str) -> Line2D:
    return Line2D([], [], label=label, **_look(row))


def _seeds(count: int) -> str:
    return f" ({count} seed{'s' if count > 1 else ''})"


def gain_panels(found: Sequence[Gain]) -> Figure:
    """Draw gains against each measure: at threshold 0.5 above, calibrated below."""
    figure = Figure((12.5, 6.2), layout="constrained")
    panels = figure.subplots(len(GAINED), len(AGAINST), sharex="col", sharey="row")
    for upper, (metric, line) in enumerate(zip(GAINED, panels, strict=True)):
        for axes, (measure, name) in zip(line, AGAINST.items(), strict=True):
            _scatter_gains(axes, found, metric, measure)
            if upper == len(GAINED) - 1:
                axes.set_xlabel(name)
                axes.locator_params(axis="x", nbins=5)
        line[0].set_ylabel(f"gain on fedavg, points of {METRICS[metric]}")
    rows, settings = dict.fromkeys(gain.row for gain in found), dict.fromkeys(gain.setting for gain in found)
    handles = [_marker(COLOUR[row], "o", shown_name(row)) for row in rows]
    handles += [_marker("white", MARKERS[setting], setting) for setting in settings]
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def _scatter_gains(axes: Axes, found: Sequence[Gain], metric: str, measure: str) -> None:
    axes.axhline(0, color=QUIET, linewidth=0.8, zorder=1)
    for gain in found:
        if gain.against[measure] is not None and metric in gain.points:
            look = {"marker": MARKERS[gain.setting], "color": COLOUR[gain.row], "edgecolors": "white"}
            size, above = (
                (52, 2) if gain.row in FOREMOST else (22, 3)
            )  # small marks on large ones, so that none hides another
            axes.scatter(gain.against[measure], gain.points[metric], size, linewidths=0.6, zorder=above, **look)  # type: ignore[arg-type]
    axes.grid()


def _marker(colour: str, marker: str, label: str) -> Line2D:
    edge = QUIET if colour == "white" else "white"
    return Line2D([], [], linestyle="", marker=marker, color=colour, markeredgecolor=edge, markersize=7, label=label)


def feature_maps(setting: str, kept: Mapping[str, Record]) -> Figure:
    """Draw the test features of components side by side, coloured by class above and by number of labels below."""
    figure = Figure((10.5, 6.6), layout="constrained")
    panels = figure.subplots(2, len(WITH_FEATURES))
    classes = readable(next(iter(kept.values()))["classes"])
    counts = sorted({count for record in kept.values() for count in record["features"]["label_counts"]})
    for (upper, lower), name in zip(panels.T, WITH_FEATURES, strict=True):
        if name not in kept:
            _empty(upper, f"{setting}, {name}: not run")
            _empty(lower, "")
            continue
        features = kept[name]["features"]
        scores = features["silhouette"]
        groups = np.array(features["classes"]), np.searchsorted(counts, features["label_counts"])
        _map(upper, features["places"], groups[0])
        _map(lower, features["places"], groups[1])
        own = scores["class, one label"]
        upper.set_title(
            f"{setting}, {name}\nsilhouette by class {scores['class']:.2f} (one label {own:.2f})", fontsize=9
        )
        lower.set_title(f"silhouette by number of labels {scores['label count']:.2f}", fontsize=9)
    figure.legend(handles=_dots(classes), loc="outside right upper", title="class")
    figure.legend(handles=_dots([str(count) for count in counts]), loc="outside right lower", title="labels")
    return figure


def _map(axes: Axes, places: Sequence[Sequence[float]], groups: NDArray[np.integer]) -> None:
    x, y = np.array(places).T
    colours, reach = [COLOURS[group % len(COLOURS)] for group in groups], 1.03 * np.abs(places).max()
    size = min(2.5, max(0.8, 8000 / len(places)))  # the more points, the smaller
    # Without smoothed edges the points have few colours and take a fraction of the bytes.
    axes.scatter(x, y, size, c=colours, linewidths=0, antialiased=False, rasterized=True)
    axes.set(xticks=[], yticks=[], xlim=(-reach, reach), ylim=(-reach, reach), box_aspect=1)
    axes.spines[:].set_visible(False)


def _empty(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_box_aspect(1)
    axes.axis("off")


def _dots(names: Sequence[str]) -> list[Line2D]:
    return [_marker(COLOURS[place % len(COLOURS)], "o", name) for place, name in enumerate(names)]


def cosine_maps(setting: str, kept: Mapping[str, Record]) -> Figure:
    """Draw the cosines between class means of components side by side."""
    classes = readable(next(iter(kept.values()))["classes"])
    figure = Figure((10.5, 3.5 + 0.06 * max(map(len, classes))), layout="constrained")  # the names below stand upright
    panels = figure.subplots(1, len(WITH_FEATURES))
    ideal, mesh = ideal_cosine(len(classes)), None
    for axes, name in zip(panels, WITH_FEATURES, strict=True):
        if name not in kept:
            _empty(axes, f"{setting}, {name}: not run")
            continue
        cosines = kept[name]["features"]["mean_cosines"]
        ticks = np.arange(len(classes)) + 0.5
        axes.set_xticks(ticks, classes, rotation=90, fontsize=7)
        axes.set_yticks(
            ticks, classes if mesh is None else [""] * len(classes), fontsize=7
        )  # only at the leftmost panel
        mesh = axes.pcolormesh(np.array(cosines), cmap="RdBu_r", vmin=-1, vmax=1)
        _write_cells(axes, cosines)
        axes.set(aspect="equal", ylim=(len(classes), 0))
        axes.set_title(f"{setting}, {name}\nmean distance to ideal {distance_to_ideal(cosines):.2f}", fontsize=9)
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=panels, shrink=0.6, label=f"cosine around the mean; ideal {ideal:.2f}")
        bar.ax.axhline(ideal, color="black", linewidth=1.2)
    return figure


def _write_cells(axes: Axes, cosines: Sequence[Sequence[float]]) -> None:
    size = min(7.0, 60 / len(cosines))  # so that a number fits its cell
    for row, values in enumerate(cosines):
        for column, value in enumerate(values):
            if row != column and not np.isnan(value):
                colour = "white" if abs(value) > 0.6 else "black"
                place, text = (column + 0.5, row + 0.5), f"{round(value, 1) + 0.0:.1f}"
                axes.text(*place, text, ha="center", va="center", fontsize=size, color=colour)
