"""Markdown tables of rows over seeds, beside the paper's numbers."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from paired import differences, over_seeds
from plan import SEEDS
from study import COMPARED, METRICS, Measure, Study, dataset_and_beta, metric_of

from fednca.bench.rows import parse_row
from fednca.methods import find_method
from fednca.report.comparison import Entry, Line, ranks
from fednca.report.published import published
from fednca.report.tables import mean_and_std

ABLATIONS = Path(__file__).parent / "published_ablations.csv"
NOT_RUN = "not run"
NOTHING = "–"
Known = Callable[[str], Mapping[str, float]]  # the paper's values for a row, by column


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Write a Markdown table; all columns after the first `texts` are numbers."""
    aligned = ["---"] * texts + ["---:"] * (len(header) - texts)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, aligned, *rows])


def folded(summary: str, content: str) -> str:
    """Write content that a click on the summary opens."""
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def number(value: float | None, digits: int = 1) -> str:
    """Write a number, and None as a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def of_seeds(count: int) -> str:
    """Write how many seeds a text rests on; empty if none is missing.

    >>> of_seeds(2), of_seeds(3)
    (' (2 of 3 seeds)', '')
    """
    return "" if count == len(SEEDS) else f" ({count} of {len(SEEDS)} seeds)"


def rows_over_seeds(
    study: Study, setting: str, rows: Mapping[str, str], columns: Iterable[str], measure: Measure, known: Known
) -> list[Line]:
    """Average rows over their seeds on the chosen draw; rows: shown name → row."""
    lines = []
    for name, row in rows.items():
        runs, reported = study.over_seeds(setting, row), known(name)
        entries = {}
        for column in columns:
            found = mean_and_std(measure(record, column) for record in runs.values())
            entries[column] = found and Entry(*found, reported.get(column))
        federated = not find_method(parse_row(row).overrides["method.name"]).rule.centralized
        lines.append(Line(name, sorted(runs), len(SEEDS), entries, federated))
    return lines


def lines_table(lines: Sequence[Line], columns: Mapping[str, str], first: str = "method") -> str:
    """Write rows over seeds; in each column the best complete row is bold and the second underlined.

    If none of the rows has been run, write only that.
    """
    if not any(line.seeds for line in lines):
        return NOT_RUN
    marks: list[Callable[[str], str]] = [lambda text: f"**{text}**", lambda text: f"<u>{text}</u>"]
    places = {column: ranks(lines, column) for column in columns}
    rows = []
    for line in lines:
        cells = []
        for column in columns:
            entry, place = line.entries[column], places[column].get(line.name)
            text = entry.text() if entry else NOTHING if line.seeds else NOT_RUN
            cells.append(text if place is None else marks[place](text))
        rows.append([line.name, *cells, line.count])
    return markdown([first, *columns.values(), "seeds"], rows)


def metrics_table(
    study: Study, setting: str, rows: Mapping[str, str], known: Known, select: str = "val", first: str = "method"
) -> str:
    """Write the known metrics of rows over seeds, with the notes of the rows."""
    lines = rows_over_seeds(study, setting, rows, METRICS, partial(metric_of, select=select), known)
    columns = {metric: name for metric, name in METRICS.items() if any(line.entries[metric] for line in lines)}
    return lines_table(lines, columns, first) + notes_below(study, [setting], rows.values())


def notes_below(study: Study, settings: Iterable[str], rows: Iterable[str]) -> str:
    """Write the notes of the rows above."""
    return "".join(f"\n\n{note}" for note in study.notes(settings, rows))


def paired_rows(
    study: Study,
    setting: str,
    pairs: Sequence[tuple[str, str]],
    called: Mapping[str, str],
    metrics: Sequence[str] = COMPARED,
    measure: Measure = metric_of,
) -> str:
    """Show paired differences of rows over seeds, named as in their table; empty if none was run."""
    rows = []
    for row, base in pairs:
        cells = [seeds_verdict(study, setting, row, base, metric, measure) for metric in metrics]
        rows.append([f"{called.get(row, row)} − {called.get(base, base)}", *cells])
    table = markdown(["difference", *(METRICS[metric] for metric in metrics)], rows)
    summary = f"{setting}: paired differences over the seeds of the draw taken (nothing about others)"
    return folded(summary, table) if any(set(cells[1:]) != {NOT_RUN} for cells in rows) else ""


def seeds_verdict(study: Study, setting: str, row: str, base: str, metric: str, measure: Measure) -> str:
    """Write the difference of two rows on the chosen draw, with the number of seeds if some are missing."""
    found = over_seeds(differences(study, setting, row, base, metric, measure), study.chosen[setting])
    return NOT_RUN if found is None else f"{found.text()} {found.verdict}{of_seeds(found.count)}"


def known_methods(setting: str, rows: Mapping[str, str]) -> Known:
    """Return the values of the paper's main tables; both variants of FedNCA-ML get the same number."""

    def known(name: str) -> dict[str, float]:
        method, _, options = rows[name].partition(":")
        plain = not options or options.startswith("variant=")
        found = {metric: published(*dataset_and_beta(setting), method, metric) for metric in METRICS}
        return {metric: value for metric, value in found.items() if plain and value is not None}

    return known


def known_ablation(ablation: str, setting: str) -> Known:
    """Return the values of the paper's ablations."""
    return lambda name: published_ablations().get((ablation, *dataset_and_beta(setting), name), {})


@cache
def published_ablations() -> dict[tuple[str, str, float, str], dict[str, float]]:
    """Read the paper's ablations: metrics by name, F1 of the classes by number."""
    table = {}
    with ABLATIONS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values = {metric: float(row[metric]) for metric in METRICS if metric in row}
            values |= {str(number): float(value) for number, value in enumerate(row["class_f1"].split())}
            table[row["ablation"], row["dataset"], float(row["beta"]), row["row"]] = values
    return table
