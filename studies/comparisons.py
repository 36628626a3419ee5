"""The main tables, and paired differences between FedNCA-ML, FedAvg and the strongest other method."""

from collections.abc import Sequence

from paired import Pairs, differences, mean_by_draw, over_draws, over_seeds, pooled
from plan import DRAWS, FEDNCA, OTHERS, SAMPLES, SEEDS, SETTINGS, TABLE, spread, strongest_other
from seed_tables import (
    NOT_RUN,
    folded,
    known_methods,
    markdown,
    metrics_table,
    notes_below,
    number,
    of_seeds,
    paired_rows,
)
from study import COMPARED, METRICS, Study, metric_of

from fednca.report.tables import SELECTIONS, mean_and_std

BASE = "fedavg"
OTHER_ROUNDS = {select: label for select, label in SELECTIONS.items() if select != "val"}


def main_tables(study: Study) -> str:
    """Show all methods on each setting."""
    text = f"""\
## Main tables

Test metrics in percent: mean ± sample standard deviation over {len(SEEDS)} training seeds on the
[draw taken](#which-draw), beside it the published value and the difference to it. The round is the one with the best
validation macro-F1. F1 is taken at 0.5; cal.: at thresholds calibrated on the clients' validation shares. Of the
federated rows with all seeds the best is bold and the second underlined; whether rows differ is said by the paired
differences that fold out below each table, and [over draws](#fednca-ml-against-fedavg). Training without a federation
does not depend on the partition: the settings of a dataset show the same runs of `centralized`, whose rounds the
validation images of the first setting chose."""
    return "\n\n".join([text, *(main_table(study, setting) for setting in SETTINGS)])


def other_data(study: Study) -> str:
    """Show all methods on samples of further datasets."""
    text = f"""\
## Other data

Parts of two more datasets, trained as the paper's settings are, on partition draw {DRAWS[0]}. They are too small to be
held against the paper's numbers: 5,000 images of COCO's train2017, whose labels lack a few positives, with 1,200 of
val2017, and the 4,999 chest X-rays of NIH's first 1,335 patients, whose images stay together. Of the X-rays the round
with the best validation macro-AUC is taken, since F1 at 0.5 is near zero for rare diseases."""
    return "\n\n".join([text, *(main_table(study, setting) for setting in SAMPLES)])


def main_table(study: Study, setting: str) -> str:
    """Show all methods on a setting, then the same for other choices of round, and paired differences."""
    rows = {row: row for row in TABLE}
    known = known_methods(setting, rows)
    others = [
        folded(f"{setting}, round: {label}", metrics_table(study, setting, rows, known, select))
        for select, label in OTHER_ROUNDS.items()
        if any(study.over_seeds(setting, row) for row in rows)
    ]
    pairs = [(row, BASE) for row in FEDNCA] + [pair for row in OTHERS for pair in ((row, BASE), (FEDNCA[0], row))]
    paired = paired_rows(study, setting, pairs, {})
    return "\n\n".join(filter(None, [f"### {setting}", metrics_table(study, setting, rows, known), *others, paired]))


def against_fedavg(study: Study) -> str:
    """Show paired differences on each setting, with a verdict."""
    text = """\
## FedNCA-ML against FedAvg

Paired differences in points, same draw and same seed, with 95 % intervals (Student's t). Draws are the unit:
differences are averaged over the seeds of a draw, and the interval is the one over draws. Where one draw alone has been
run, the interval is over its seeds and says nothing about other draws. The verdict is `better` or `worse` where the
interval leaves out zero, `equal` (not told apart) where it contains it, and `undecided` where there are fewer than
three draws or seeds; orderings on this page rest on nothing else, and one in twenty such intervals misses the truth by
chance. The strongest other method is the one with the best mean validation macro-F1 on the draw taken."""
    rows = [row for setting in SETTINGS for row in verdicts(study, setting, compared_rows(study, setting))]
    header = ["setting", "difference", *(METRICS[metric] for metric in COMPARED), "draws", "pairs"]
    summary = markdown(header, rows, texts=2)
    notes = notes_below(study, SETTINGS, [row for s in SETTINGS for pair in compared_rows(study, s) for row in pair])
    details = [
        folded(f"{setting}: over seeds, over draws, and both", paired_table(study, setting))
        for setting in SETTINGS
        if any(row[0] == setting and row[-1] != "0" for row in rows)
    ]
    return "\n\n".join([text, summary + notes, *details])


def compared_rows(study: Study, setting: str) -> list[tuple[str, str]]:
    """Return the pairs of rows to compare on a setting, with the strongest other method once it is known."""
    paper, released = FEDNCA
    pairs = [(paper, BASE), (released, BASE), (released, paper)]
    draw = study.chosen[setting]
    other = None if draw is None else strongest_other(setting, draw, study.records)
    return pairs if other is None else [*pairs, (other, BASE), *((row, other) for row in FEDNCA)]


def verdicts(study: Study, setting: str, pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Write a verdict for each pair of rows and metric."""
    rows = []
    for row, base in pairs:
        found = {metric: differences(study, setting, row, base, metric) for metric in COMPARED}
        places = sorted(set().union(*found.values()))
        drawn = {draw for draw, _ in places}
        rows.append([setting, f"{row} − {base}", *map(judged, found.values()), str(len(drawn)), str(len(places))])
    return rows


def judged(pairs: Pairs) -> str:
    """Write the mean difference with its interval and verdict."""
    return f"{interval(pairs)} {verdict(pairs)}" if pairs else NOT_RUN


def interval(pairs: Pairs) -> str:
    """Write the mean difference with its interval."""
    found = pooled(pairs)
    return NOT_RUN if found is None else found.text()


def verdict(pairs: Pairs) -> str:
    """Write the verdict on a row against another, with a note if it rests on one draw only."""
    found = pooled(pairs)
    if found is None:
        return NOT_RUN
    if len(mean_by_draw(pairs)) > 1:
        return found.verdict
    return f"{found.verdict} on this draw{of_seeds(found.count)}"


def paired_table(study: Study, setting: str) -> str:
    """Show each comparison over seeds, over draws and over both."""
    rows = []
    for row, base in compared_rows(study, setting):
        for metric in COMPARED:
            pairs = differences(study, setting, row, base, metric)
            seeds, drawn, both = over_seeds(pairs, study.chosen[setting]), over_draws(pairs, SEEDS[0]), pooled(pairs)
            counted = [NOT_RUN if each is None else f"{each.text()} ({each.count})" for each in (seeds, drawn)]
            own = NOT_RUN if both is None else f"{both.text()} ({unit(pairs)})"
            rows.append([f"{row} − {base}", METRICS[metric], *counted, own, verdict(pairs)])
    header = ["difference", "metric", "over seeds, draw taken", f"over draws, seed {SEEDS[0]}", "both", "verdict"]
    return markdown(header, rows, texts=2)


def unit(pairs: Pairs) -> str:
    """Write the number of draws or runs behind an interval."""
    drawn = mean_by_draw(pairs)
    return f"{len(drawn)} draws" if len(drawn) > 1 else f"{len(pairs)} on one draw"


def several_draws(study: Study) -> str:
    """Show how much a method varies over draws, beside how much it varies over seeds."""
    text = f"""\
## Draws beside seeds

Each draw with training seed {SEEDS[0]}; the deviations are sample standard deviations over the draws, and over the
seeds of the draw taken."""
    return "\n\n".join([text, *(spread_table(study, setting) for setting in SETTINGS)])


def spread_table(study: Study, setting: str) -> str:
    """Show the methods that have runs on several draws of a setting."""
    entries = spread(setting, study.records)
    if not entries:
        return f"### {setting}: several draws\n\n{NOT_RUN}: no draw is taken yet."
    drawn, rows = list(dict.fromkeys(entry.draw for entry in entries)), dict.fromkeys(entry.row for entry in entries)
    table = [spread_cells(study, setting, row, metric, drawn) for row in rows for metric in COMPARED]
    names = [f"draw {draw}" + (" (taken)" if draw == study.chosen[setting] else "") for draw in drawn]
    header = ["method", "metric", *names, "mean over draws", "± over draws", "± over seeds"]
    unknown = "" if len(rows) > len((BASE, *FEDNCA)) else f"\n\nThe strongest other method: {NOT_RUN}, not known yet."
    notes = notes_below(study, [setting], rows)
    return f"### {setting}: several draws\n\n{markdown(header, table, texts=2)}{unknown}{notes}"


def spread_cells(study: Study, setting: str, row: str, metric: str, drawn: Sequence[int]) -> list[str]:
    """Write a method's metric on each draw, and its deviation over draws and over seeds."""
    records = [study.find(setting, row, draw, SEEDS[0]) for draw in drawn]
    values = [None if record is None else metric_of(record, metric) for record in records]
    cells = [NOT_RUN if record is None else number(value) for record, value in zip(records, values, strict=True)]
    mean, over_draws = mean_and_std(values) or (None, None)
    runs = study.over_seeds(setting, row)
    _, over_seeds = mean_and_std(metric_of(record, metric) for record in runs.values()) or (None, None)
    known = f"{number(mean)} (of {len(drawn) - values.count(None)})" if None in values and mean else number(mean)
    return [row, METRICS[metric], *cells, known, number(over_draws), with_count(over_seeds, len(runs))]


def with_count(std: float | None, seeds: int) -> str:
    """Write a deviation over seeds, with their number if some are missing."""
    return number(std) if std is None or seeds == len(SEEDS) else f"{number(std)} (of {seeds})"
