"""Tables for the terminal."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from fednca.data.partition import summary
from fednca.progress import SHOWN

if TYPE_CHECKING:
    from fednca.data.federation import Federation
    from fednca.options import Options

SELECTIONS = {"val": "best validation", "paper": "best test (paper's code)", "last": "last round"}


def partition_table(federation: "Federation") -> Table:
    """Show how many positives of each class every client has; a dot is a class it never sees."""
    share = federation.train
    counts = summary(share.partition, share.split.labels[share.rows])
    left_out = sum(map(len, share.partition.left_out.values()))
    title = f"{federation.dataset.name}: training images of {len(counts)} clients by class ({left_out} left out)"
    table = Table(title=title, title_justify="left")
    table.add_column("client", justify="right")
    table.add_column("images", justify="right")
    for name in federation.dataset.classes:
        table.add_column(name, justify="right")
    for k, row in enumerate(counts):
        cells = [str(n) if held else "·" for n, held in zip(row, share.partition.classes[k], strict=True)]
        table.add_row(str(k), str(len(share.partition.clients[k])), *cells)
    table.add_section()
    total = sum(map(len, share.partition.clients))
    table.add_row("all", str(total), *map(str, np.sum(counts, axis=0)))
    return table


def results_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show test metrics in percent, a row each; `rows` maps a name to a result with `round` and `test`."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for label in (*SHOWN.values(), "round"):
        table.add_column(label, justify="right")
    for name, result in rows.items():
        values = [result["test"][key] for key in SHOWN]
        table.add_row(name, *("–" if v is None else f"{100 * v:.1f}" for v in values), str(result["round"]))
    return table


def selections_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show one run's test metrics under each way to choose a round."""
    return results_table(title, {label: results[key] for key, label in SELECTIONS.items() if key in results})


def options_table(title: str, options: "type[Options]") -> Table:
    """Show the options of a method or dataset with their defaults."""
    table = Table(title=title, title_justify="left")
    for column in ("option", "default", "what it does"):
        table.add_column(column)
    for name, field in options.model_fields.items():
        table.add_row(name, "" if field.default is None else str(field.default), field.description or "")
    return table


def names_table(kind: str, rows: Mapping[str, tuple[str, str]], last: str) -> Table:
    """Show names with a sentence and one more fact each."""
    table = Table()
    for column in (kind, "what it is", last):
        table.add_column(column)
    for name, facts in rows.items():
        table.add_row(name, *facts)
    return table
