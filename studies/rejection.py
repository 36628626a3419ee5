"""The section on whether L_Neg can be met: its sum with BCE, beside the least that any features could reach."""

from collections.abc import Collection
from statistics import fmean
from typing import NamedTuple

import numpy as np
from plan import COMPONENTS, GRID, GRID_LONGER, GRID_ROUNDS, SETTINGS
from seed_tables import NOT_RUN, markdown, notes_below, number
from study import Record, Study

ROWS = (COMPONENTS["all"], COMPONENTS["LADM + ETF + L_Neg"])
MOST_LABELS = 2  # of an image in these datasets


class Least(NamedTuple):
    """The smallest sum of BCE and λ1·L_Neg on absent classes, and the probability of these classes at it."""

    value: float
    probability: float


def can_it_be_met(study: Study) -> str:
    """Show the two losses in the last round, beside their least sum."""
    text = f"""\
### Can L_Neg be met?

The vectors of an ETF sum to zero, and so do the products of a feature with all of them. L_Neg asks of the feature of a
class that an image lacks to have small products with all vectors but its own (σ up to τ = 0.3): of C classes, its
product with its own is then (C - 1)·0.85 or more, where BCE asks for a small one, since it is the class's score. Both
cannot be had. Below: BCE and λ1·L_Neg in the last round (while clients train, means over seeds and draws), and the
least that their sum can be for images of at most {MOST_LABELS} labels, whatever the network, with the probability that
an absent class has there."""
    rows = []
    for row in ROWS:
        for setting in SETTINGS:
            rows += line(setting, row, study.everywhere(setting, row).values())
        for rounds in (GRID_ROUNDS, GRID_LONGER):
            found = [record for setting in GRID for record in study.everywhere(setting, row, rounds).values()]
            rows += line(f"digits, {rounds} rounds", row, found)
    header = ["setting", "method", "λ1", "BCE", "λ1·L_Neg", "sum", "least", "probability there", "runs"]
    table = markdown(header, rows, texts=2) if rows else NOT_RUN
    return f"{text}\n\n{table}{notes_below(study, SETTINGS, ROWS)}"


def line(place: str, row: str, records: Collection[Record]) -> list[list[str]]:
    """Return a line of the table, or none if nothing was run."""
    if not records:
        return []
    found, *_ = records
    options = found["config"]["method"]["options"]
    bce, rejection = (fmean(record["losses"][term] for record in records) for term in ("bce", "neg"))
    floor = least(len(found["classes"]), options["lambda1"], options["tau"])
    shown = [f"{options['lambda1']:g}", *(number(value, 3) for value in (bce, rejection, bce + rejection, *floor))]
    return [[place, row, *shown, str(len(records))]]


def least(classes: int, weight: float, tau: float) -> Least:
    """Return the least of BCE (a mean over classes) and weight·L_Neg, over all features of absent classes.

    Of a feature's products with the other classes, suppose that k lie above the cut and count. Softplus is convex, so
    these are best all equal; the others are best at the cut, where they take the largest part of the sum at no cost.
    """
    others, cut = classes - 1, np.log(tau / (1 - tau))
    own = np.linspace(-20, 20, 40001)[:, None]
    counting = np.arange(1, others + 1)
    each = (-own - (others - counting) * cut) / counting
    rejections = np.where(each >= cut, counting / others * np.logaddexp(0, each), np.inf)
    met = np.where(own >= -others * cut, 0, np.inf)
    bce = (classes - MOST_LABELS) / classes * np.logaddexp(0, own[:, 0])
    sums = bce + weight * np.hstack([met, rejections]).min(axis=1)
    best = sums.argmin()
    return Least(float(sums[best]), float(1 / (1 + np.exp(-own[best, 0]))))
