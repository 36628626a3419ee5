"""A bench's results beside the paper's: mean and deviation over seeds, as text, Markdown, CSV or LaTeX."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.markup import escape

from fednca.bench.cells import Bench
from fednca.measures.metrics import SHOWN
from fednca.methods import create_method
from fednca.report.published import reported
from fednca.report.tables import CALIBRATED, SELECTIONS, mean_and_std

AT_THRESHOLDS = "_calibrated"
COLUMNS = SHOWN | {f"{metric}{AT_THRESHOLDS}": f"{SHOWN[metric]} cal." for metric in CALIBRATED}
LATEX = str.maketrans({"\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "~": r"\~{}", "^": r"\^{}"})
LATEX |= str.maketrans({sign: rf"\{sign}" for sign in "_%&#${}"})
Mark = Callable[[str], str]


@dataclass(frozen=True)
class Entry:
    """A metric of a row over its seeds and the paper's value, if there is one, both in percent."""

    mean: float
    std: float | None
    published: float | None

    def text(self) -> str:
        """Write mean ± deviation and, if there is one, the published value with the difference from it.

        >>> Entry(55.0, 7.07, 50.0).text()
        '55.0±7.1 (50.0, +5.0)'
        """
        own = f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f}±{self.std:.1f}"
        beside = "" if self.published is None else f" ({self.published:.1f}, {self.mean - self.published:+.1f})"
        return own + beside


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    name: str
    seeds: list[int]
    wanted: int  # how many seeds the bench asks for
    entries: dict[str, Entry | None]
    federated: bool  # False for centralized training, which is a reference and not ranked
    note: str = ""  # a remark to print wherever the row is shown

    @property
    def complete(self) -> bool:
        """Whether all seeds have been run."""
        return len(self.seeds) == self.wanted

    @property
    def count(self) -> str:
        """How many seeds have been run, and out of how many if some are missing.

        >>> [Line("fedavg", seeds, 3, {}, federated=True).count for seeds in ([0, 1, 2], [1], [])]
        ['3', '1 of 3', '0 of 3']
        """
        return str(self.wanted) if self.complete else f"{len(self.seeds)} of {self.wanted}"


def compare(bench: Bench, select: str = "val") -> list[Line]:
    """Return the rows of a bench; `select` names the round of each run to report, as in `Run.results`."""
    lines = []
    for row, runs in zip(bench.rows, bench.runs().values(), strict=True):
        results = [run.results[select] for run in runs.values()]
        config = bench.cell(row, 0).config
        method, known = create_method(config), reported(config)
        entries = {}
        for metric in COLUMNS:
            found = mean_and_std(value_of(result, metric) for result in results)
            entries[metric] = found and Entry(
                100 * found[0], None if found[1] is None else 100 * found[1], known.get(metric)
            )
        seeds, federated = sorted(runs), not method.rule.centralized
        lines.append(Line(row.text, seeds, len(bench.seeds), entries, federated, method.learner.note))
    return lines


def value_of(result: Mapping[str, Any], metric: str, part: str = "test") -> float | None:
    """Return a metric of a run or a round; None for calibrated F1 where an older version did not keep it."""
    if metric.endswith(AT_THRESHOLDS):
        result = result.get("calibrated", {})
    value: float | None = result[part][metric.removesuffix(AT_THRESHOLDS)] if result else None
    return value


def ranks(lines: Sequence[Line], metric: str) -> dict[str, int]:
    """Return 0 for the best and 1 for the second federated rows with all seeds; equal shown values share a place."""
    known = {line.name: line.entries[metric] for line in lines if line.federated and line.complete}
    values = {name: round(entry.mean, 1) for name, entry in known.items() if entry}
    order = sorted(set(values.values()), reverse=True)[:2]
    return {name: order.index(value) for name, value in values.items() if value in order}


def grid(lines: Sequence[Line], best: Mark, second: Mark, plain: Mark) -> list[list[str]]:
    """Return the table's cells with best and second marked in each column; a row without runs says `not run`."""
    places = {metric: ranks(lines, metric) for metric in COLUMNS}
    marks = [best, second, plain]
    table = []
    for line in lines:
        cells = [plain(line.name), line.count]
        for metric, entry in line.entries.items():
            missing = "–" if line.seeds else "not run"
            mark = marks[places[metric].get(line.name, 2)]
            cells.append(mark(entry.text()) if entry else plain(missing))
        table.append(cells)
    return table


def header() -> list[str]:
    """Return the columns' names."""
    return ["method", "seeds", *COLUMNS.values()]


def remarks(lines: Sequence[Line], select: str) -> list[str]:
    """Return the legend of the table, then the remarks about single rows."""
    known = any(entry and entry.published is not None for line in lines for entry in line.entries.values())
    beside = " (published value, difference from it)" if known else ""
    legend = (
        f"round: {SELECTIONS[select]}; mean±sample standard deviation over seeds{beside}; "
        "F1 at threshold 0.5, cal.: at thresholds chosen on validation images; "
        "among federated rows with all seeds the best is bold, the second underlined"
    )
    return [legend, *(f"{line.name}: {line.note}" for line in lines if line.note)]


def to_markdown(lines: Sequence[Line], select: str = "val") -> str:
    """Write a Markdown table with best bold and second underlined."""
    rows = grid(lines, lambda text: f"**{text}**", lambda text: f"<u>{text}</u>", str)
    aligned = ["---", *["---:"] * (len(header()) - 1)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [header(), aligned, *rows])
    return "\n\n".join([table, *remarks(lines, select)]) + "\n"


def to_latex(lines: Sequence[Line], select: str = "val") -> str:
    """Write a LaTeX tabular with best bold and second underlined."""

    def clean(text: str) -> str:
        return text.translate(LATEX)

    rows = grid(lines, lambda text: rf"\textbf{{{clean(text)}}}", lambda text: rf"\underline{{{clean(text)}}}", clean)
    body = "\n".join(" & ".join(row) + r" \\" for row in rows)
    columns = "l" + "r" * (len(header()) - 1)
    top = " & ".join(header()) + r" \\"
    table = f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{top}\n\\hline\n{body}\n\\hline\n\\end{{tabular}}"
    return "\n\n".join([table, *map(clean, remarks(lines, select))]) + "\n"


def to_csv(lines: Sequence[Line], select: str = "val") -> str:
    """Write one line per row and metric, with unrounded numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "select", "seeds", "metric", "mean", "std", "published", "note"])
    for line in lines:
        for metric, entry in line.entries.items():
            numbers = [entry.mean, entry.std, entry.published] if entry else [None] * 3
            writer.writerow([line.name, select, " ".join(map(str, line.seeds)), metric, *numbers, line.note])
    return out.getvalue()


def to_text(lines: Sequence[Line], select: str = "val") -> str:
    """Write console markup for a terminal, with best bold and second underlined."""
    plain = [header(), *grid(lines, str, str, str)]
    styled = grid(lines, partial(style, "bold"), partial(style, "underline"), escape)
    marked = [[style("dim", name) for name in header()], *styled]
    widths = [max(len(row[i]) for row in plain) for i in range(len(header()))]
    out = []
    for bare, shown in zip(plain, marked, strict=True):
        pads = [" " * (width - len(cell)) for width, cell in zip(widths, bare, strict=True)]
        cells = [shown[0] + pads[0], *(pad + cell for pad, cell in zip(pads[1:], shown[1:], strict=True))]
        out.append("  ".join(cells))
    legend, *notes = remarks(lines, select)
    return "\n".join([*out, style("dim", legend), *map(escape, notes)]) + "\n"


def style(name: str, text: str) -> str:
    """Wrap a text in the console markup of a style."""
    return f"[{name}]{escape(text)}[/{name}]"


FORMATS: dict[str, Callable[[Sequence[Line], str], str]] = {
    "text": to_text,
    "markdown": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
}
