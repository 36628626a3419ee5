"""The section on whether FedNCA-ML is faster or better: its lead on FedAvg by round."""

from collections.abc import Sequence
from functools import partial
from itertools import product

from comparisons import BASE, interval
from paired import Pairs, differences, pooled
from plan import FEDNCA, GRID_LONGER, LACKING, SETTINGS
from seed_tables import NOT_RUN, markdown, number
from study import METRICS, Record, Study, gamma_and_beta
from summary import counted
from swings import curve

from fednca.report.tables import mean_and_std

SPAN = 5  # a mark stands for the mean of this many rounds, the last of which it names
MARKS = (20, 40, 60, 80, 100)
LONG_MARKS = (20, 50, 100, 150, GRID_LONGER)
PACED = ("macro_f1_calibrated", "macro_auc")
OTHER = "spherefed"  # the other method with a fixed classifier


def sooner_or_better(study: Study) -> str:
    """Show leads on FedAvg at several rounds of the paper's settings."""
    text = f"""\
### Sooner, or better?

By how many points FedNCA-ML, and SphereFed, whose classifier is fixed, too, are above FedAvg after so many rounds: test
metrics, each the mean of {SPAN} rounds up to that one, paired and with intervals as [below](#fednca-ml-against-fedavg);
bold where three draws or seeds tell them apart. No round is chosen here. Runs on DermaMNIST did not keep calibrated F1
by round."""
    rows = []
    for setting, row, metric in product(SETTINGS, (*FEDNCA, OTHER), PACED):
        found = leads(study, setting, row, metric, MARKS)
        rows += [[setting, row, METRICS[metric], *map(marked, found), counted(found[0])]] if found[0] else []
    header = ["setting", "method", "metric", *map(str, MARKS), "rests on"]
    return f"{text}\n\n{markdown(header, rows, texts=3) if rows else NOT_RUN}"


def long_runs(study: Study) -> str:
    """Show what more rounds do on digits; empty if there are no longer runs."""
    rows, own = [], FEDNCA[0]
    for setting, metric in product(LACKING, PACED):
        base = study.everywhere(setting, BASE, GRID_LONGER).values()
        if not base:
            continue
        means = [mean_and_std(level(record, metric, mark) for record in base) for mark in LONG_MARKS]
        gained = map(marked, leads(study, setting, own, metric, LONG_MARKS, GRID_LONGER))
        place = [*gamma_and_beta(setting), METRICS[metric]]
        rows += [[*place, BASE, *(number(mean and mean[0]) for mean in means)], [*place, f"{own} − {BASE}", *gained]]
    if not rows:
        return ""
    text = f"""\
### More rounds, digits

The same for {GRID_LONGER} rounds where clients lack classes: FedAvg, and how far `{own}` is above it after so many
rounds (the mean of {SPAN} up to that one; bold where told apart)."""
    return f"{text}\n\n{markdown(['gamma', 'beta', 'metric', '', *map(str, LONG_MARKS)], rows, texts=4)}"


def leads(
    study: Study, setting: str, row: str, metric: str, marks: Sequence[int], rounds: int | None = None
) -> list[Pairs]:
    """Return a row's lead on FedAvg at each mark."""
    return [differences(study, setting, row, BASE, metric, partial(level, mark=mark), rounds) for mark in marks]


def marked(pairs: Pairs) -> str:
    """Write the mean difference with its interval, bold if the interval leaves out zero."""
    found = pooled(pairs)
    told = found is not None and found.verdict in ("better", "worse")
    return f"**{interval(pairs)}**" if told else interval(pairs)


def level(record: Record, metric: str, mark: int) -> float | None:
    """Return the mean test metric of the rounds up to the mark, in percent; None if it was not recorded."""
    if metric not in record["curves"]["test"]:
        return None
    return float(curve(record, metric)[mark - SPAN : mark].mean())
