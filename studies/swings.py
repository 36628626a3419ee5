"""Do runs settle? How far the test metric of a round is from that of the round before, and of the one before that."""

import numpy as np
from plan import SETTINGS, TABLE
from seed_tables import NOT_RUN, markdown, notes_below, number, of_seeds
from study import Record, Study

METRIC = "macro_auc"
APART = (1, 2)  # rounds


def do_runs_settle(study: Study) -> str:
    """Show how far apart neighbouring rounds are, and every second one."""
    text = """\
### Do runs settle?

Points of test macro-AUC between a round and the next, and between a round and the one after the next: the mean over the
later half of the rounds and over seeds, on the draw taken. Of noise alone both are the same. Where the first is much
larger, the averaged model goes to and fro between two states, and which of them a run ends in is chance."""
    rows = []
    for setting in SETTINGS:
        for row in TABLE:
            runs = study.over_seeds(setting, row)
            if runs:
                means = [np.mean([step(record, apart) for record in runs.values()]) for apart in APART]
                rows.append([setting, row + of_seeds(len(runs)), *(number(float(mean), 2) for mean in means)])
    if not rows:
        return f"{text}\n\n{NOT_RUN}"
    table = markdown(["setting", "method", "next round", "the one after"], rows, texts=2)
    return f"{text}\n\n{table}" + notes_below(study, SETTINGS, TABLE)


def step(record: Record, apart: int) -> float:
    """Return the mean distance in points between rounds so many apart, in the later half of a run."""
    values = 100 * np.array(record["curves"]["test"][METRIC], dtype=float)
    later = values[len(values) // 2 :]
    return float(np.abs(later[apart:] - later[:-apart]).mean())
