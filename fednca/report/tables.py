"""Tables for the terminal."""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from fednca.config.fields import describe_option
from fednca.data.facts import client_names, train_counts
from fednca.measures.metrics import SHOWN

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from fednca.data.federation import Federation
    from fednca.data.types import Source

CALIBRATED = ("macro_f1", "micro_f1")
SELECTIONS = {"val": "best validation", "paper": "best test, as the paper's code", "last": "last round"}


def partition_table(federation: "Federation") -> Table:
    """Show how many images of each class every client has; a dot is a class it never sees."""
    share = federation.train
    counts = train_counts(federation)  # (K, C)
    sizes = [len(rows) for rows in share.partition.clients]
    left_out = sum(map(len, share.partition.left_out.values()))
    unreadable = sum(len(split.unreadable) for split in federation.dataset.splits())
    also = f", {unreadable} images of all splits unreadable" if unreadable else ""
    title = f"{federation.dataset.name}: training images by class and client (· never seen; {left_out} left out{also})"
    table = Table(title=escape(title), title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("client", overflow="fold")  # names wrap first: numbers are narrower
    for name in client_names(federation):
        table.add_column(escape(name), justify="right")
    table.add_column("all", justify="right", style="bold")
    for c, name in enumerate(federation.dataset.classes):
        cells = [str(n) if held else "·" for n, held in zip(counts[:, c], share.partition.classes[:, c], strict=True)]
        table.add_row(escape(name), *cells, str(counts[:, c].sum()))
    table.add_section()
    table.add_row("images", *map(str, sizes), str(sum(sizes)), style="bold")
    return table


def results_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show test metrics in percent, one row per result; `rows` maps a name to a result with `round` and `test`."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE)
    table.add_column("")
    labels = [*SHOWN.values(), *(f"{SHOWN[key]} cal." for key in CALIBRATED), "round"]
    for label in labels:
        table.add_column(label.replace("-", "\n"), justify="right", no_wrap=True)
    for name, result in rows.items():
        calibrated = result.get("calibrated", {}).get("test", {})
        values = [result["test"][key] for key in SHOWN] + [calibrated.get(key) for key in CALIBRATED]
        table.add_row(escape(name), *("–" if v is None else f"{100 * v:.1f}" for v in values), str(result["round"]))
    table.caption = "F1 at threshold 0.5; cal.: at thresholds calibrated on the clients' validation images" + "".join(
        f"\n{escape(name)}: {metric} is not defined for {missing} of {len(values)} classes; its mean leaves them out"
        for name, result in rows.items()
        for metric, values in (("AUC", result["test"]["class_auc"]), ("F1", result["test"]["class_f1"]))
        if (missing := values.count(None))
    )
    return table


def selections_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show one run's test metrics for each way of choosing a round."""
    return results_table(title, {label: results[key] for key, label in SELECTIONS.items() if key in results})


def mean_and_std(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Return mean and sample standard deviation (n - 1) of the known values; one value has no deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def options_table(title: str, flag: str, options: "Mapping[str, FieldInfo]") -> Table:
    """Show the options of a method or dataset as flags, `--flag.NAME`, with their defaults."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE)
    for column in ("option", "default", "what it does"):
        table.add_column(column, no_wrap=column == "option")
    for name, field in options.items():
        default = "" if field.default is None else str(field.default)
        table.add_row(f"--{flag}.{name.replace('_', '-')}", default, describe_option(field))
    return table


def methods_table(classes: int) -> Table:
    """Show how each method differs from FedAvg, and what a client uploads per round."""
    from fednca.methods import find_method, method_names
    from fednca.report.methods import megabytes, upload

    title = f"methods; upload: what a client sends per round with a ResNet-18 and {classes} classes"
    table = Table(title=escape(title), title_justify="left", box=SIMPLE)
    for column in ("method", "upload", "head / local objective / state / aggregation", "from"):
        table.add_column(column, no_wrap=column in {"method", "upload"})
    for name in method_names():
        about = (method := find_method(name)).about
        changes = " / ".join((about.head, about.objective, about.state, about.aggregation))
        table.add_row(name, megabytes(upload(method, classes)), changes, about.paper)
    return table


def datasets_table(sources: "Mapping[str, Source]", root: Path) -> Table:
    """Show what each dataset is, and whether its files are in its folder below `root`."""
    table = Table(box=SIMPLE)
    for column in ("dataset", "here", "what it is"):
        table.add_column(column, no_wrap=column == "dataset")
    for name, source in sources.items():
        present = "no" if source.missing(root / name) else "yes"
        facts = {"size": source.SIZE, "classes": len(source.CLASSES) or "yours"}
        facts |= {"obtained": source.OBTAINED, "licence": source.LICENCE}
        about = "\n".join([source.SUMMARY, *(f"[dim]{key}:[/] {value}" for key, value in facts.items())])
        table.add_row(name, present, about)
        table.add_section()
    return table
