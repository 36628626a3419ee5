"""The section on whether runs settle: how much metrics move between rounds, and if the chosen one stands out."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import fmean

import numpy as np
from comparisons import BASE, judged
from gains import GAINED
from numpy.typing import NDArray
from paired import differences, signed
from plan import FEDNCA, SETTINGS, TABLE
from seed_tables import NOT_RUN, markdown, notes_below, number, of_seeds
from study import METRICS, Measure, Record, Study, metric_of
from summary import counted

SWINGING = ("macro_auc", "macro_f1")
APART = {1: "next round", 2: "the one after"}


def do_runs_settle(study: Study) -> str:
    """Show how far metrics move in one and in two rounds, and by how much the chosen round stands out."""
    text = """\
### Do runs settle?

Points between a test metric (F1 at threshold 0.5) of a round and of the next, and of the one after the next: the mean
over the later half of the rounds and over seeds, on the draw taken. Of noise alone both are the same; where the first
is much larger, the averaged model goes to and fro between two states. The last columns: by how many points the round
with the best validation macro-F1, the one of the main tables, is above the mean of the rounds before and after it, and
the mean of the later half of the rounds, which nothing chose, at threshold 0.5 and at those calibrated in each round
(earlier runs did not keep these)."""
    rows = []
    for setting in SETTINGS:
        for row in TABLE:
            runs = study.over_seeds(setting, row).values()
            if runs:
                steps = [fmean(step(run, metric, apart) for run in runs) for metric in SWINGING for apart in APART]
                means = [later_mean(list(runs), metric) for metric in GAINED]
                steady = [signed(fmean(map(above_neighbours, runs))), *map(number, means)]
                rows.append([setting, row + of_seeds(len(runs)), *(number(each, 2) for each in steps), *steady])
    if not rows:
        return f"{text}\n\n{NOT_RUN}"
    header = ["setting", "method", *(f"{METRICS[metric]}: {name}" for metric in SWINGING for name in APART.values())]
    header += ["macro-F1: chosen round above", *(f"{METRICS[metric]}: later mean" for metric in GAINED)]
    table = markdown(header, rows, texts=2) + notes_below(study, SETTINGS, TABLE)
    return "\n\n".join([text, table, by_round(study)])


def by_round(study: Study) -> str:
    """Show FedNCA-ML's gain on FedAvg over draws, for several choices of round."""
    text = """\
FedNCA-ML minus FedAvg in macro-F1 over all draws that were run, as [below](#fednca-ml-against-fedavg): in the round
that validation chose, on average over the later half of the rounds, and in the last round; at threshold 0.5 and, where
it was kept, calibrated."""
    last = partial(metric_of, select="last")
    measures: dict[str, Measure] = {"chosen round": metric_of, "later half": mean_of_later, "last round": last}
    rows = []
    for setting, row, metric in product(SETTINGS, FEDNCA, GAINED):
        found = [differences(study, setting, row, BASE, metric, own) for own in measures.values()]
        shown = [judged(pairs) if pairs else number(None) for pairs in found]
        rows += [[setting, row, METRICS[metric], *shown, counted(found[0])]] if found[0] else []
    header = ["setting", "method", "metric", *measures, "rests on"]
    return f"{text}\n\n{markdown(header, rows, texts=3) if rows else NOT_RUN}"


def step(record: Record, metric: str, apart: int) -> float:
    """Return the mean distance in points between rounds `apart` rounds apart, in the later half of a run."""
    later = later_half(record, metric)
    return float(np.abs(later[apart:] - later[:-apart]).mean())


def above_neighbours(record: Record) -> float:
    """Return by how many points the chosen round's test macro-F1 is above the mean of its two neighbours."""
    values, rounds = curve(record, "macro_f1"), record["curves"]["round"]
    place = rounds.index(record["results"]["val"]["round"])
    beside = [values[each] for each in (place - 1, place + 1) if 0 <= each < len(values)]
    return float(values[place] - np.mean(beside))


def later_mean(records: Sequence[Record], metric: str) -> float | None:
    """Return the mean test metric of the later half of runs, in percent; None if a run did not record it."""
    means = [mean_of_later(record, metric) for record in records]
    known = [mean for mean in means if mean is not None]
    return fmean(known) if len(known) == len(means) else None


def mean_of_later(record: Record, metric: str) -> float | None:
    """Return the mean test metric of the later half of a run, in percent; None if it was not recorded."""
    return float(later_half(record, metric).mean()) if metric in record["curves"]["test"] else None


def later_half(record: Record, metric: str) -> NDArray[np.float64]:
    """Return a test metric of the later half of the rounds, in percent."""
    values = curve(record, metric)
    return values[len(values) // 2 :]


def curve(record: Record, metric: str) -> NDArray[np.float64]:
    """Return a test metric by round, in percent."""
    return 100 * np.array(record["curves"]["test"][metric], dtype=float)
