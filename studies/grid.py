"""The section on gains on the same images, dealt more or less unequally while nothing else changes."""

from collections.abc import Sequence
from statistics import fmean

from comparisons import BASE, judged
from gains import GAINED, correlations, gains, numbers_of
from pace import long_runs
from paired import differences
from plan import GRID, GRID_ROUNDS, GRID_ROWS, GRID_TRIALS
from seed_tables import NOT_RUN, folded, markdown, number
from study import METRICS, Measure, Study, gamma_and_beta, metric_of, validation_of

HELPING = GRID_ROWS[1:]
OWN, *OTHER_HEADS = (row for row in HELPING if row != "fedavg-balanced")
TEXT = f"""\
## The same images, dealt more or less unequally

The settings above differ in more than how unlike their clients are. Here nothing else changes: scikit-learn's
handwritten digits, one or two on a canvas of 16 px, a small ResNet from random weights and ten clients, as the preset
`demo` has it, dealt by each gamma and beta on three draws ({GRID_ROUNDS} rounds, one training seed). `digits-B-G`
below is beta B with gamma G; at gamma 0.3 a sixth to a fifth of the images fit no client and are left out. Two cores
train it all in three hours (`python studies/run.py --only digits --minutes 240`). The images are small and easy: what
is seen here is when a method helps, not by how much it would elsewhere.

Gains on FedAvg are means over three draws, with 95 % intervals and verdicts as [above](#fednca-ml-against-fedavg);
beside them FedAvg's own mean."""
AUC = "macro_auc"
RANKS = "Rank correlation (Spearman's) of the gain with each measure over all draws."


def same_images(study: Study, figure: str | None) -> str:
    """Show gains by gamma and beta; figure: the link to the picture."""
    found = list(gains(study, GRID, HELPING))
    if figure is None:
        return f"{TEXT}\n\n{NOT_RUN}"
    ranked = correlations(found, HELPING)
    tables = [f"### {METRICS[metric]}, digits\n\n{gains_table(study, metric, BASE, HELPING)}" for metric in GAINED]
    folds = [folded(METRICS[AUC], gains_table(study, AUC, BASE, HELPING))]
    folds += [
        folded(f"{METRICS[metric]}: differences to `{OWN}`", gains_table(study, metric, OWN, OTHER_HEADS))
        for metric in GAINED
    ]
    below = [ranked and f"{RANKS}\n\n{ranked}", numbers_of(found), rates_table(study), long_runs(study)]
    return "\n\n".join(filter(None, [TEXT, *tables, *folds, figure, *below]))


def gains_table(
    study: Study,
    metric: str,
    base: str,
    others: Sequence[str],
    settings: Sequence[str] = tuple(GRID),
    measure: Measure = metric_of,
) -> str:
    """Show a metric of one row and the differences of other rows from it, most different clients first."""
    rows = []
    for setting in settings:
        found = [measure(record, metric) for record in study.everywhere(setting, base).values()]
        known = [value for value in found if value is not None]
        gained = [judged(differences(study, setting, row, base, metric, measure)) for row in others]
        rows.append([*gamma_and_beta(setting), number(fmean(known)) if known else NOT_RUN, *gained])
    return markdown(["gamma", "beta", base, *others], rows, texts=0)


def rates_table(study: Study) -> str:
    """Show the learning rates that were tried with FedAvg; empty if none were."""
    one = GRID_TRIALS[0]
    records = [study.records.get(entry.path) for entry in GRID_TRIALS]
    tried = [record for record in [*records, study.find(one.setting, BASE, one.draw, one.seed)] if record is not None]
    if len(tried) < 2:
        return ""
    rows = [
        [f"{record['config']['train']['lr']:g}", number(validation_of(record, "macro_f1"))]
        + [number(metric_of(record, metric)) for metric in (*GAINED, AUC)]
        for record in sorted(tried, key=lambda record: float(record["config"]["train"]["lr"]))
    ]
    header = ["learning rate", "val. macro-F1", *(METRICS[metric] for metric in (*GAINED, AUC))]
    summary = f"The learning rate, tried with FedAvg on {one.setting}, draw {one.draw}"
    return folded(summary, markdown(header, rows, texts=0))
