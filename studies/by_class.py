"""The section on which classes make the gain: F1 by class of FedNCA-ML and FedAvg on every draw that has both."""

from collections.abc import Sequence

import numpy as np
from comparisons import BASE
from numpy.typing import NDArray
from paired import signed
from plan import FEDNCA, SETTINGS
from seed_tables import NOT_RUN, markdown, number
from study import Record, Study

METHOD = FEDNCA[0]


def which_classes(study: Study) -> str:
    """Show the class that gains most on each draw."""
    text = f"""\
### Which classes make the gain?

F1 of the class that gains most with `{METHOD}` over FedAvg, on each draw that both were run on (means over seeds, the
round that validation chose): at threshold 0.5, how many points of the gain in macro-F1 are its own, and calibrated."""
    rows = []
    for setting in SETTINGS:
        own, base = (study.everywhere(setting, row) for row in (METHOD, BASE))
        for draw in sorted({draw for draw, _ in own.keys() & base.keys()}):
            seeds = sorted(seed for where, seed in own.keys() & base.keys() if where == draw)
            pairs = [[runs[draw, seed] for seed in seeds] for runs in (base, own)]
            rows.append([setting, str(draw), str(len(seeds)), *most_gaining(*pairs)])
    header = ["setting", "draw", "seeds", "gain in macro-F1", "class", "its points", BASE, METHOD]
    header += [f"{name} cal." for name in (BASE, METHOD)]
    return f"{text}\n\n{markdown(header, rows) if rows else NOT_RUN}"


def most_gaining(base: Sequence[Record], own: Sequence[Record]) -> list[str]:
    """Return the gain, the class with the largest one, its share, and its F1 at 0.5 and calibrated."""
    before, after = (class_f1([run["results"]["val"] for run in runs]) for runs in (base, own))
    best = int((after - before).argmax())
    calibrated = [class_f1([run["results"]["val"]["calibrated"] for run in runs])[best] for runs in (base, own)]
    points = (after - before) / len(before)
    shown = [number(value) for value in (before[best], after[best], *calibrated)]
    return [signed(points.sum()), own[0]["classes"][best], signed(points[best]), *shown]


def class_f1(results: Sequence[Record]) -> NDArray[np.float64]:
    """Return the mean F1 of each class on test images, in percent."""
    means: NDArray[np.float64] = 100 * np.mean([result["test"]["class_f1"] for result in results], axis=0)
    return means
