"""The section on when a method helps: its gain on FedAvg against how different the clients are."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from comparisons import BASE
from paired import differences, mean_by_draw, signed
from plan import DRAWS, FEDNCA, OTHERS, SETTINGS
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from seed_tables import NOT_RUN, NOTHING, folded, markdown, notes_below, number
from study import METRICS, Record, Study, metric_of

GAINED = ("macro_f1", "macro_f1_calibrated")
SKEWS = {
    "label_distance": "label distance",
    "missing_classes": "missing classes",
    "cooccurrence_distance": "co-occurrence distance",
}
LIFT = "lift"
AGAINST = {**SKEWS, LIFT: "FedAvg lifted by calibrating"}
RANKS = """\
Rank correlation (Spearman's) of the gain with each of them, over the draws of all settings, for methods that were run
on five draws or more. Draws are few, and settings differ in more than what is measured: take it as a hint."""
ENOUGH = len(DRAWS)  # fewest draws, over all settings, for a correlation
HELPING = (*FEDNCA, *OTHERS)  # the federated rows besides FedAvg


@dataclass(frozen=True)
class Gain:
    """The gain of a row on FedAvg on one draw, in points, averaged over seeds."""

    setting: str
    row: str
    draw: int
    seeds: int
    points: dict[str, float]  # by metric
    against: dict[str, float | None]  # measures of the draw, and of FedAvg on it


def gains(study: Study, settings: Iterable[str] = SETTINGS, rows: Sequence[str] = HELPING) -> Iterator[Gain]:
    """Yield the gain of every row on every draw that FedAvg was also run on."""
    for setting in settings:
        base = study.everywhere(setting, BASE)
        for row in rows:
            pairs = {metric: differences(study, setting, row, BASE, metric) for metric in GAINED}
            means = {metric: mean_by_draw(own) for metric, own in pairs.items()}
            for draw in means[GAINED[0]]:
                beside = [base[draw, seed] for where, seed in pairs[GAINED[0]] if where == draw]
                points = {metric: own[draw] for metric, own in means.items() if draw in own}
                skew = {name: beside[0]["partition"][name] for name in SKEWS}
                yield Gain(setting, row, draw, len(beside), points, {**skew, LIFT: lift(beside)})


def lift(records: list[Record]) -> float | None:
    """Return how many points of macro-F1 calibrated thresholds add, averaged over runs."""
    found = [[metric_of(record, metric) for metric in GAINED] for record in records]
    known = [calibrated - half for half, calibrated in found if half is not None and calibrated is not None]
    return fmean(known) if known else None


def correlations(found: Sequence[Gain], helping: Sequence[str] = HELPING) -> str:
    """Show the correlation of gains with each measure over the draws of all settings; empty with too few draws."""
    rows = []
    for row, metric in product(helping, GAINED):
        own = [gain for gain in found if gain.row == row and metric in gain.points]
        if len(own) >= ENOUGH:
            pairs = {name: [(gain.against[name], gain.points[metric]) for gain in own] for name in AGAINST}
            rows.append([row, METRICS[metric], *map(rank_correlation, pairs.values()), str(len(own))])
    return markdown(["method", "gain in", *AGAINST.values(), "draws"], rows, texts=2) if rows else ""


def numbers_of(found: Iterable[Gain]) -> str:
    """Show the numbers of a figure in a folded table."""
    header = ["setting", "method", "draw", "seeds", *AGAINST.values(), *(METRICS[metric] for metric in GAINED)]
    rows = [
        [
            *(gain.setting, gain.row, str(gain.draw), str(gain.seeds)),
            *(number(value, 2) for value in gain.against.values()),
            *(signed(gain.points[metric]) for metric in GAINED),
        ]
        for gain in found
    ]
    return folded("The numbers of the figure", markdown(header, rows, texts=2))


def rank_correlation(pairs: list[tuple[float | None, float]]) -> str:
    """Write Spearman's correlation of the known pairs; a constant has none.

    >>> rank_correlation([(1.0, 5.0), (2.0, 6.0), (9.0, 7.0), (None, 1.0)])
    '+1.00'
    """
    known = [(measure, points) for measure, points in pairs if measure is not None]
    constant = len({measure for measure, _ in known}) < 2 or len({points for _, points in known}) < 2
    return NOTHING if constant else f"{spearmanr(known).statistic:+.2f}"


def when_it_helps(study: Study, figure: str | None) -> str:
    """Show gains against how different the clients are; figure: the link to the picture."""
    text = """\
## When does it help?

Gain on FedAvg in points of macro-F1 (same draw, same seed, averaged over as many seeds as the numbers of the figure
say) against how unlike the clients of the draw are (measured [so](#which-draw)), at 0.5 above and at calibrated
thresholds below. The last column of panels: against the points by which calibrated thresholds lift FedAvg itself on
that draw, which anyone who has trained FedAvg can measure. FedAvg stands on both axes there: a gain at 0.5 that is
nothing but a better operating point rises along with it, one that is more stays where FedAvg needs no calibrating."""
    found = list(gains(study))
    if figure is None:
        return f"{text}\n\n{NOT_RUN}"
    ranked = correlations(found)
    parts = [text, figure + notes_below(study, SETTINGS, HELPING), ranked and f"{RANKS}\n\n{ranked}", numbers_of(found)]
    return "\n\n".join(filter(None, parts))
