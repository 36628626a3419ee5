"""Paired differences between two rows, on the same draw with the same seed, and intervals for their mean."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.stats import t  # type: ignore[import-untyped]
from study import Measure, Study, metric_of

CONFIDENCE = 0.95
FEWEST = 3  # fewest differences for a verdict: two may agree by chance
Pairs = Mapping[tuple[int, int], float]  # points by draw and seed


@dataclass(frozen=True)
class Interval:
    """The mean of some differences with its 95 % interval; a single difference has none."""

    count: int
    mean: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """`better` or `worse` if the interval leaves out zero, else `equal`; `undecided` with too few differences."""
        if self.low is None or self.high is None or self.count < FEWEST:
            return "undecided"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "equal"

    def text(self) -> str:
        """Write mean and interval.

        >>> t_interval([1.0, 2.0, 3.0]).text()
        '+2.0 [-0.5, +4.5]'
        """
        if self.low is None or self.high is None:
            return signed(self.mean)
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


def signed(value: float) -> str:
    """Write points with their sign, also when they round to zero.

    >>> signed(-0.04)
    '-0.0'
    """
    return f"{value:+.1f}"


def differences(
    study: Study,
    setting: str,
    row: str,
    base: str,
    metric: str,
    measure: Measure = metric_of,
    rounds: int | None = None,
) -> dict[tuple[int, int], float]:
    """Return by how many points a row is above another wherever both were run; rounds: the usual by default."""
    own, others = (study.everywhere(setting, each, rounds) for each in (row, base))
    found = {}
    for place in sorted(own.keys() & others.keys()):
        value, other = measure(own[place], metric), measure(others[place], metric)
        if value is not None and other is not None:
            found[place] = value - other
    return found


def t_interval(values: Iterable[float]) -> Interval:
    """Return Student's interval for the mean of independent values."""
    known = list(values)
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Interval(1, mean, None, None)
    reach = t.ppf((1 + CONFIDENCE) / 2, len(known) - 1) * statistics.stdev(known) / math.sqrt(len(known))
    return Interval(len(known), mean, mean - float(reach), mean + float(reach))


def on_draw(pairs: Pairs, draw: int | None) -> Pairs:
    """Return the differences on one draw."""
    return {(where, seed): value for (where, seed), value in pairs.items() if where == draw}


def over_seeds(pairs: Pairs, draw: int | None) -> Interval | None:
    """Return the interval over the seeds of one draw."""
    own = on_draw(pairs, draw)
    return t_interval(own.values()) if own else None


def over_draws(pairs: Pairs, seed: int) -> Interval | None:
    """Return the interval over draws with one seed."""
    own = [value for (_, number), value in pairs.items() if number == seed]
    return t_interval(own) if own else None


def pooled(pairs: Pairs) -> Interval | None:
    """Return the interval over draws of the means over seeds, or over seeds if there is only one draw."""
    means = mean_by_draw(pairs)
    return t_interval(means.values() if len(means) > 1 else pairs.values()) if pairs else None


def mean_by_draw(pairs: Pairs) -> dict[int, float]:
    """Average over the seeds of each draw."""
    drawn = sorted({draw for draw, _ in pairs})
    return {draw: statistics.fmean(value for (where, _), value in pairs.items() if where == draw) for draw in drawn}
