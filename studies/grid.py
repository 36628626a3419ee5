"""Gains on the same images, dealt more or less unequally: what skew does when nothing else changes."""

from statistics import fmean

from comparisons import BASE, judged
from gains import GAINED, correlations, gains, numbers_of
from paired import differences
from plan import GRID, GRID_ROUNDS, GRID_ROWS, GRID_TRIALS
from seed_tables import NOT_RUN, folded, markdown, number
from study import METRICS, Study, metric_of, validation_of

HELPING = GRID_ROWS[1:]
TEXT = f"""\
## The same images, dealt more or less unequally

The settings above differ in more than how unlike their clients are. Here nothing else changes: scikit-learn's
handwritten digits, one or two on a canvas of 16 px, a small ResNet from random weights and ten clients, as the preset
`demo` has it, dealt by each gamma and beta on three draws ({GRID_ROUNDS} rounds, one training seed). Whoever has two
cores can repeat it in an hour or two (`python studies/run.py --only digits --minutes 180`). The images are small and
easy: what is seen here is when a method helps, not by how much it would elsewhere.

Each gain on FedAvg is the mean over three draws, with its 95 % interval and verdict as
[above](#fednca-ml-against-fedavg); with FedAvg's own mean."""
RANKS = "Rank correlation (Spearman's) of the gain with each measure over all draws."


def same_images(study: Study, figure: str | None) -> str:
    """Show gains by gamma and beta; figure: the link to the picture."""
    found = list(gains(study, GRID, HELPING))
    if figure is None:
        return f"{TEXT}\n\n{NOT_RUN}"
    ranked = correlations(found, HELPING)
    auc = folded("macro-AUC", gains_table(study, "macro_auc"))
    tables = [f"### {METRICS[metric]}, digits\n\n{gains_table(study, metric)}" for metric in GAINED]
    parts = [TEXT, *tables, auc, figure, ranked and f"{RANKS}\n\n{ranked}", numbers_of(found), rates_table(study)]
    return "\n\n".join(filter(None, parts))


def gains_table(study: Study, metric: str) -> str:
    """Show a metric of FedAvg and the gains of others on it, the most unlike clients first."""
    rows = []
    for setting, dealt in GRID.items():
        base = [metric_of(record, metric) for record in study.everywhere(setting, BASE).values()]
        known = [value for value in base if value is not None]
        own = [judged(differences(study, setting, row, BASE, metric)) for row in HELPING]
        cells = [str(dealt["partition.gamma"]), str(dealt["partition.beta"])]
        rows.append([*cells, number(fmean(known)) if known else NOT_RUN, *own])
    return markdown(["gamma", "beta", BASE, *HELPING], rows, texts=0)


def rates_table(study: Study) -> str:
    """Show the learning rates that FedAvg was tried with; nothing where it was not."""
    one = GRID_TRIALS[0]
    records = [study.records.get(entry.path) for entry in GRID_TRIALS]
    tried = [record for record in [*records, study.find(one.setting, BASE, one.draw, one.seed)] if record is not None]
    if len(tried) < 2:
        return ""
    rows = [
        [f"{record['config']['train']['lr']:g}", number(validation_of(record, "macro_f1"))]
        + [number(metric_of(record, metric)) for metric in (*GAINED, "macro_auc")]
        for record in sorted(tried, key=lambda record: float(record["config"]["train"]["lr"]))
    ]
    header = ["learning rate", "val. macro-F1", *(METRICS[metric] for metric in (*GAINED, "macro_auc"))]
    summary = f"The learning rate, tried with FedAvg on {one.setting}, draw {one.draw}"
    return folded(summary, markdown(header, rows, texts=0))
