"""When does a method help? Its gain on FedAvg beside how unlike the clients are."""

from collections.abc import Iterator
from dataclasses import dataclass

from comparisons import BASE
from paired import differences, mean_by_draw, signed
from plan import FEDNCA, OTHERS, SETTINGS
from seed_tables import NOT_RUN, folded, markdown, notes_below, number
from study import METRICS, Study

GAINED = ("macro_f1", "macro_f1_calibrated")
SKEWS = {
    "label_distance": "label distance",
    "missing_classes": "missing classes",
    "cooccurrence_distance": "co-occurrence distance",
}
HELPING = (*FEDNCA, *OTHERS)  # the federated rows beside FedAvg


@dataclass(frozen=True)
class Gain:
    """By how many points a row is above FedAvg on one draw, averaged over seeds."""

    setting: str
    row: str
    draw: int
    seeds: int
    points: dict[str, float]  # by metric
    skew: dict[str, float | None]


def gains(study: Study) -> Iterator[Gain]:
    """Yield the gain of every row and draw that was run beside FedAvg."""
    for setting in SETTINGS:
        base = study.everywhere(setting, BASE)
        for row in HELPING:
            pairs = {metric: differences(study, setting, row, BASE, metric) for metric in GAINED}
            means = {metric: mean_by_draw(own) for metric, own in pairs.items()}
            for draw in means[GAINED[0]]:
                seeds = [seed for where, seed in pairs[GAINED[0]] if where == draw]
                partition = base[draw, seeds[0]]["partition"]
                points = {metric: own[draw] for metric, own in means.items() if draw in own}
                yield Gain(setting, row, draw, len(seeds), points, {name: partition[name] for name in SKEWS})


def when_it_helps(study: Study, figure: str | None) -> str:
    """Show gains against skew; figure: the link to the picture."""
    text = """\
## When does it help?

Gain on FedAvg in points of macro-F1 (same draw, same seed, averaged over as many seeds as the numbers of the figure
say) against how unlike the clients of the draw are (measured [so](#which-draw)), at 0.5 above and at calibrated
thresholds below."""
    found = list(gains(study))
    if figure is None:
        return f"{text}\n\n{NOT_RUN}"
    header = ["setting", "method", "draw", "seeds", *SKEWS.values(), *(METRICS[metric] for metric in GAINED)]
    rows = [
        [
            *(gain.setting, gain.row, str(gain.draw), str(gain.seeds)),
            *(number(value, 2) for value in gain.skew.values()),
            *(signed(gain.points[metric]) for metric in GAINED),
        ]
        for gain in found
    ]
    notes = notes_below(study, SETTINGS, HELPING)
    return "\n\n".join([text, figure + notes, folded("The numbers of the figure", markdown(header, rows, texts=2))])
