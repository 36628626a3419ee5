"""Tables for the terminal: predictions, and metrics with their intervals."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fednca.measures.metrics import SHOWN
from fednca.use.predict import Prediction

ANY_WIDTH = 10_000  # wide enough for every table


def predictions_table(title: str, found: Sequence[Prediction]) -> Table:
    """Show the classes found in each image with their probabilities, or the likeliest class if none is found."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE)
    table.add_column("image", overflow="fold")
    table.add_column("found", overflow="fold")
    for each in found:
        listed = ", ".join(f"{escape(name)} {each.probabilities[name]:.2f}" for name in each.labels)
        likeliest = each.likeliest()
        nothing = f"[dim]nothing; likeliest: {escape(likeliest)} {each.probabilities[likeliest]:.2f}[/]"
        table.add_row(escape(str(each.path)), listed or nothing)
    return table


def fit(table: Callable[[str], Table], console: Console) -> Table:
    """Make a table with intervals beside the metrics, or below them if the table would else be too wide."""
    beside = table(" ")
    whole = console.measure(beside, options=console.options.update_width(ANY_WIDTH)).maximum
    return beside if whole <= console.width else table("\n")


def means_table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]], gap: str = " ") -> Table:
    """Show metrics in percent with their intervals, for all images and by group; `gap` stands between the two."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    for label in SHOWN.values():
        table.add_column(label, justify="right", no_wrap=True)
    for name, facts in rows:
        table.add_row(escape(name), str(facts["images"]), *(bounded(facts["metrics"][key], gap) for key in SHOWN))
    return table


def classes_table(classes: Mapping[str, Mapping[str, Any]], gap: str = " ") -> Table:
    """Show each class's metrics in percent with their intervals; `gap` stands between the two."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = "shown: number of images that show the class; above: F1 counts it as found above this probability"
    table.add_column("class", overflow="fold")
    for label in ("shown", "AUC", "AP", "F1", "above"):
        table.add_column(label, justify="right", no_wrap=True)
    for name, facts in classes.items():
        metrics = [bounded(facts[kind], gap) for kind in ("auc", "ap", "f1")]
        table.add_row(escape(name), str(facts["positives"]), *metrics, f"{facts['threshold']:.3f}")
    return table


def bounded(metric: Mapping[str, float | None], gap: str = " ") -> str:
    """Write a share in percent, then its bounds after a gap.

    >>> bounded({"value": 0.5, "low": 0.4, "high": 0.625}), bounded({"value": None, "low": None, "high": None})
    ('50.0 40.0–62.5', '–')
    """
    value, low, high = (metric[key] for key in ("value", "low", "high"))
    if value is None:
        return "–"
    return f"{100 * value:.1f}" + ("" if low is None or high is None else f"{gap}{100 * low:.1f}–{100 * high:.1f}")
