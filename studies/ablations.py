"""The paper's ablations and the rows that ask for a fair comparison."""

from collections.abc import Mapping, Sequence

from comparisons import BASE
from paired import differences, over_seeds
from plan import ABLATED, COMPONENTS, DERMAMNIST, EXTRAS, FEDNCA, QUERIES
from seed_tables import (
    NOT_RUN,
    Known,
    folded,
    known_ablation,
    known_methods,
    lines_table,
    markdown,
    metrics_table,
    of_seeds,
    rows_over_seeds,
)
from study import COMPARED, METRICS, Record, Study

from fednca.data.sources.dermamnist import CLASSES

FULL = COMPONENTS["all"]


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
        pairs = [(row, COMPONENTS["FC"]) for name, row in COMPONENTS.items() if name != "FC"]
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
    """Show whether simpler changes of FedAvg close the gap."""
    text = """\
## Fair-comparison extras

FedAvg with an MLP head, with class-balanced or asymmetric losses, with other heads and other server optimisers: does
one of them do what FedNCA-ML does? The paper has no such rows."""
    rows = {row: row for row in (BASE, *FEDNCA, *EXTRAS)}
    parts = [text]
    for setting in DERMAMNIST:
        table = metrics_table(study, setting, rows, known_methods(setting, rows))
        pairs = [pair for row in EXTRAS for pair in ((row, BASE), (FULL, row))]
        parts += [f"### {setting}: extras", table, paired_rows(study, setting, pairs, {})]
    return "\n\n".join(filter(None, parts))


def names(rows: Mapping[str, str]) -> dict[str, str]:
    """Return how rows are called in their ablation."""
    return {row: name for name, row in rows.items()}


def paired_rows(study: Study, setting: str, pairs: Sequence[tuple[str, str]], called: Mapping[str, str]) -> str:
    """Show paired differences of rows over seeds, called as their table calls them; nothing where none was run."""
    rows = []
    for row, base in pairs:
        cells = [seeds_verdict(study, setting, row, base, metric) for metric in COMPARED]
        rows.append([f"{called.get(row, row)} − {called.get(base, base)}", *cells])
    table = markdown(["difference", *(METRICS[metric] for metric in COMPARED)], rows)
    summary = f"{setting}: paired differences over the seeds of the draw taken (nothing about others)"
    return folded(summary, table) if any(set(cells[1:]) != {NOT_RUN} for cells in rows) else ""


def seeds_verdict(study: Study, setting: str, row: str, base: str, metric: str) -> str:
    """Write the difference of two rows on the draw taken, and over how many seeds where some are missing."""
    found = over_seeds(differences(study, setting, row, base, metric), study.chosen[setting])
    return NOT_RUN if found is None else f"{found.text()} {found.verdict}{of_seeds(found.count)}"
