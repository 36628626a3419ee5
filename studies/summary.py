"""The top of the page: its subject, and FedNCA-ML against FedAvg at a glance."""

from comparisons import BASE, interval, judged
from facts import of_tables
from paired import Pairs, differences, mean_by_draw, signed
from plan import FEDNCA, SETTINGS, TABLE, eventual_runs, plan
from seed_tables import NOTHING, markdown, notes_below
from study import Study, dataset_and_beta

from fednca.report.published import published

INTRODUCTION = """\
# Results

The paper's tables on DermaMNIST and CIFAR-10, trained with this package, beside the published numbers. Every number is
computed from the records in `studies/records/`: one file per run with its settings, seed, commit and hardware, all of
them listed [at the end](#records). What has not been run stands as `not run`; nothing is estimated.

A setting is a dataset with its beta: the smaller, the more unequally clients share a class. Gamma is the part of all
classes that a client may hold, a draw one partition made by both. Of the [methods](methods.md), `fednca-ml` is
FedNCA-ML by the paper's equations and `fednca-ml:variant=released` what its authors' code computes."""


def in_short(study: Study) -> str:
    """Introduce the page and show whether FedNCA-ML is better than FedAvg on each setting."""
    done = sum(entry.path in study.records for entry in plan(study.records))
    main = ", ".join(f"{setting} {of_main_table(study, setting)}" for setting in SETTINGS)
    text = f"""\
{INTRODUCTION}

## In short

{done} of {eventual_runs()} runs are done ([part by part](#how-it-was-run)); of the main tables: {main}.

FedNCA-ML minus FedAvg in points, same draw and same seed, with 95 % intervals: `better` or `worse` where the interval
leaves out zero, `equal` (not told apart) where it contains it, `undecided` with fewer than three draws or seeds. On one
draw alone nothing is known of others. F1 at 0.5 depends on where a method's scores happen to lie, F1 at thresholds
calibrated on the clients' validation shares (cal.) much less; how far the gain shrinks from the one to the other stands
beside them. More [below](#fednca-ml-against-fedavg)."""
    header = ["setting", "method", "macro-F1 at 0.5", "published", "macro-F1 cal.", "lost by calibrating"]
    header += ["macro-AUC", "published", "rests on"]
    rows = [glance(study, setting, row) for setting in SETTINGS for row in FEDNCA]
    return f"{text}\n\n{markdown(header, rows, texts=2)}{notes_below(study, SETTINGS, FEDNCA)}"


def of_main_table(study: Study, setting: str) -> str:
    """Write how many runs of a setting's main table are done."""
    entries, total = of_tables(study, [setting], TABLE)
    return f"{sum(entry.path in study.records for entry in entries)} of {total}"


def glance(study: Study, setting: str, row: str) -> list[str]:
    """Write a variant's differences from FedAvg on a setting, the published ones, and the number of runs."""
    half, calibrated, auc = (
        differences(study, setting, row, BASE, metric) for metric in ("macro_f1", "macro_f1_calibrated", "macro_auc")
    )
    lost = {place: half[place] - calibrated[place] for place in half.keys() & calibrated.keys()}
    at_half = [judged(half), published_gain(setting, "macro_f1")]
    return [
        *(setting, row, *at_half, judged(calibrated), interval(lost)),
        *(judged(auc), published_gain(setting, "macro_auc"), counted(half)),
    ]


def published_gain(setting: str, metric: str) -> str:
    """Write the paper's gain of FedNCA-ML on FedAvg in points."""
    own, base = (published(*dataset_and_beta(setting), method, metric) for method in (FEDNCA[0], BASE))
    return NOTHING if own is None or base is None else signed(own - base)


def counted(pairs: Pairs) -> str:
    """Write how many draws and pairs of runs are behind some differences."""
    if not pairs:
        return NOTHING
    drawn = len(mean_by_draw(pairs))
    return f"{drawn} draw{'s' if drawn > 1 else ''}, {len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
