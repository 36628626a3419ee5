"""The sections on the paper's ablations and on fair comparison."""

from collections.abc import Mapping

from comparisons import BASE
from grid import gains_table
from plan import ABLATED, CANDIDATES, COMPONENTS, DERMAMNIST, EXTRAS_OF, FEDNCA, LACKING, QUERIES
from seed_tables import (
    Known,
    known_ablation,
    known_methods,
    lines_table,
    metrics_table,
    paired_rows,
    rows_over_seeds,
)
from study import METRICS, Record, Study, validation_of

from fednca.data.sources.dermamnist import CLASSES

FULL = COMPONENTS["all"]
# Each row and the row it adds a component to; both losses, alone and together, are added to the same row.
ADDED = {
    "ETF": "FC",
    "LADM + ETF": "ETF",
    "LADM + ETF + L_Neg": "LADM + ETF",
    "LADM + ETF + L_Pos": "LADM + ETF",
    "all": "LADM + ETF",
}


def components(study: Study) -> str:
    """Show what each component adds."""
    text = """\
## Components

As the main tables: draw taken, round of the best validation macro-F1. The paper's ablations carry no deviations, and
its first and last rows differ a little from its main tables."""
    parts = [text]
    for setting in ABLATED:
        known = known_ablation("components", setting)
        table = metrics_table(study, setting, COMPONENTS, known, first="components")
        compared = [*ADDED.items(), *[(name, "FC") for name in ADDED if ADDED[name] != "FC"]]
        pairs = [(COMPONENTS[name], COMPONENTS[base]) for name, base in compared]
        parts += [f"### {setting}: components", table]
        if setting in DERMAMNIST:
            parts += [classes_table(study, setting, known)]
        parts += [paired_rows(study, setting, pairs, names(COMPONENTS))]
    return "\n\n".join(filter(None, parts))


def classes_table(study: Study, setting: str, known: Known) -> str:
    """Show the F1 of each class of DermaMNIST for the component rows."""
    columns = {str(place): name for place, name in enumerate(CLASSES)}
    lines = rows_over_seeds(study, setting, COMPONENTS, columns, class_f1, known)
    text = "F1 by class at 0.5; the paper does not name its columns, their shading by frequency fits this order."
    return f"{text}\n\n{lines_table(lines, columns, 'components')}"


def class_f1(record: Record, place: str) -> float | None:
    """Return the test F1 of a class in percent."""
    value = record["results"]["val"]["test"]["class_f1"][int(place)]
    return None if value is None else 100 * value


def queries(study: Study) -> str:
    """Show what the attention's queries add."""
    text = """\
## Queries

LADM + ETF without the added losses, as in the paper: learnable or fixed queries, begun at random or as an ETF."""
    parts = [text]
    for setting in ABLATED:
        table = metrics_table(study, setting, QUERIES, known_ablation("queries", setting), first="queries")
        fixed = QUERIES["fixed, ETF"]
        pairs = [(fixed, row) for row in QUERIES.values() if row != fixed]
        parts += [f"### {setting}: queries", table, paired_rows(study, setting, pairs, names(QUERIES))]
    return "\n\n".join(filter(None, parts))


def extras(study: Study) -> str:
    """Show whether simpler changes to FedAvg close the gap."""
    text = """\
## Fair-comparison extras

FedAvg with an MLP head, with class-balanced or asymmetric losses, with other heads and other server optimisers: does
one of them do what FedNCA-ML does? On CIFAR-10 the MLP head alone is asked. The paper has no such rows."""
    parts = [text]
    for setting, own in EXTRAS_OF.items():
        rows = {row: row for row in (BASE, *FEDNCA, *own)}
        table = metrics_table(study, setting, rows, known_methods(setting, rows))
        pairs = [pair for row in own for pair in ((row, BASE), (FULL, row))]
        parts += [f"### {setting}: extras", table, paired_rows(study, setting, pairs, {})]
    return "\n\n".join(filter(None, parts))


def candidates(study: Study) -> str:
    """Show by validation metrics whether other choices than the paper's suit FedNCA-ML better."""
    text = """\
## Could FedNCA-ML be better?

FedNCA-ML whose server goes half of the way to the clients' average, with class-balanced BCE, and with queries that are
trained, on the draw taken, and on [digits](#the-same-images-dealt-more-or-less-unequally) where clients lack classes,
over three draws. These are validation metrics, at 0.5, of the round with the best validation macro-F1, so that test
images do not decide between them; the half steps were thought of, though, after a look at [test
curves](#do-runs-settle)."""
    columns = {metric: METRICS[metric] for metric in ("macro_f1", "macro_auc")}
    rows = {row: row for row in (FULL, *CANDIDATES)}
    parts = [text]
    for setting in DERMAMNIST:
        lines = rows_over_seeds(study, setting, rows, columns, validation_of, lambda _: {})
        paired = paired_rows(study, setting, [(row, FULL) for row in CANDIDATES], {}, list(columns), validation_of)
        parts += [f"### {setting}: candidates", lines_table(lines, columns), paired]
    for metric, name in columns.items():
        table = gains_table(study, metric, FULL, CANDIDATES, LACKING, validation_of)
        parts += [f"### {name} of validation, digits: candidates\n\n{table}"]
    return "\n\n".join(filter(None, parts))


def names(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the names of rows in their ablation."""
    return {row: name for name, row in rows.items()}
