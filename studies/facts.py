"""The sections on how the runs were made, on the draws, and the list of all records."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from plan import (
    ABLATED,
    CANDIDATES,
    COMPONENTS,
    DERMAMNIST,
    DRAW_ROUNDS,
    DRAWS,
    EXTRAS_OF,
    FEDNCA,
    GRID,
    QUERIES,
    SAMPLES,
    SEEDS,
    SETTINGS,
    TABLE,
    Entry,
    draws,
    eventual_runs,
    gap,
    grid,
    plan,
    rounds_of,
    spread,
    tables,
)
from seed_tables import NOT_RUN, NOTHING, folded, markdown, number
from study import Record, Study, dataset_and_beta, metric_of, tried

from fednca.bench.rows import show
from fednca.measures.metrics import SHOWN
from fednca.report.comparison import Entry as Beside
from fednca.report.published import published

SHORT = 8  # characters of a commit
TRAINED_BY = {  # the settings of a run to show, and their place in its config
    "clients": ("partition", "clients"),
    "beta": ("partition", "beta"),
    "gamma": ("partition", "gamma"),
    "pixels": ("data", "image_size"),
    "backbone": ("model", "backbone"),
    "starts from": ("model", "pretrained"),
    "rounds": ("train", "rounds"),
    "local epochs": ("train", "local_epochs"),
    "batch": ("train", "batch_size"),
    "optimiser": ("train", "optimizer"),
    "lr": ("train", "lr"),
    "precision": ("train", "precision"),
}

COMMANDS = """\
    python studies/run.py --minutes 60   # trains what has no record yet, in the order of studies/plan.py
    python studies/page.py               # writes this page and its figures from the records

The files lie in `data/`: `dermamnist.npz` (DermaMNIST, 28 px, in MedMNIST's order and splits; made anew from HAM10000's
thumbnails, so that pixels are slightly off MedMNIST's), `cifar-10-batches-bin/` (CIFAR-10, the binary version), `coco/`
and `nih-sample/` (see [Other data](#other-data)), `clip/*.npz` (CLIP's embeddings of "a NAME" for the classes of
CIFAR-10 and COCO, for FedLGT) and `resnet18_imagenet.safetensors` (an ImageNet ResNet-18, from which all but CIFAR-10's
runs start; its convolutions are rounded to half precision and its BatchNorm statistics taken anew)."""


def how_it_was_run(study: Study) -> str:
    """Show how the runs were made, and how much of the plan is done."""
    parts = ["## How it was run", facts_table(study), COMMANDS, progress_table(study), settings_table(study)]
    return "\n\n".join(filter(None, parts))


def facts_table(study: Study) -> str:
    """Show hardware, versions and commits of the records."""
    records = study.records.values()
    done = sum(entry.path in study.records for entry in plan(study.records))
    hours = sum(record["seconds"] for record in records) / 3600
    versions = [
        ", ".join(f"{name} {version}" for name, version in {"Python": r["python"], **r["packages"]}.items() if version)
        for r in records
    ]
    facts = {
        "runs": f"{done} of {eventual_runs()} done",
        "hardware": counted(record["gpu"] or "CPU" for record in records),
        "training": f"{hours:.1f} hours, added over {len(records)} runs; runs side by side count each",
        "versions": counted(versions),
        "commits": counted(record["commit"][:SHORT] for record in records),
    }
    return markdown(["", ""], facts.items(), texts=2)


def counted(names: Iterable[str]) -> str:
    """List different names with the number of runs of each; the number is left out for a single name."""
    found = sorted(Counter(names).items())
    if len(found) == 1:
        return found[0][0]
    return "; ".join(f"{name} ({times} run{'s' if times > 1 else ''})" for name, times in found) or NOTHING


def progress_table(study: Study) -> str:
    """Show how much of each part of the plan is done; a run may serve several parts."""
    parts: dict[str, tuple[list[Entry], int]] = {
        f"draws ({DRAW_ROUNDS} rounds of FedAvg)": (
            [entry for setting in SETTINGS for entry in draws(setting)],
            len(SETTINGS) * len(DRAWS),
        ),
        **{f"table {setting}": of_tables(study, [setting], TABLE) for setting in (*SETTINGS, *SAMPLES)},
        "component ablations": of_tables(study, ABLATED, COMPONENTS.values()),
        "several draws": (
            [entry for setting in SETTINGS for entry in spread(setting, study.records)],
            len(SETTINGS) * len(DRAWS) * (len(FEDNCA) + 2),  # + FedAvg and the strongest other method
        ),
        **{f"extras {setting}": of_tables(study, [setting], rows) for setting, rows in EXTRAS_OF.items()},
        "candidates": of_tables(study, DERMAMNIST, CANDIDATES),
        "query ablations": of_tables(study, ABLATED, QUERIES.values()),
        "digits, dealt more or less unequally": (grid(), len(grid())),
    }
    rows = [
        [name, str(sum(entry.path in study.records for entry in entries)), str(total)]
        for name, (entries, total) in parts.items()
    ]
    return markdown(["part (a run may serve several)", "runs done", "of"], rows)


def settings_table(study: Study) -> str:
    """Show the training settings of the runs, by their records; leave out settings without records."""
    rows = []
    for setting in (*SETTINGS, *SAMPLES, *GRID):
        configs = [record["config"] for path, record in study.records.items() if is_whole(setting, path, record)]
        cells = [
            ", ".join(sorted({show(config[part].get(name)) for config in configs}))
            for part, name in TRAINED_BY.values()
        ]
        rows += [[setting, *cells]] if configs else []
    return markdown(["setting", *TRAINED_BY], rows) if rows else ""


def is_whole(setting: str, path: Path, record: Record) -> bool:
    """Return whether a record is one of a setting's full runs, over all rounds and without changes."""
    rounds = record["config"]["train"]["rounds"]
    return record["setting"] == setting and rounds == rounds_of(setting) and not tried(path, record)


def of_tables(study: Study, settings: Iterable[str], rows: Iterable[str]) -> tuple[list[Entry], int]:
    """Return the runs of tables known so far, and how many there will be."""
    settings, rows = list(settings), list(rows)
    return tables(settings, rows, study.records), len(settings) * len(rows) * len(SEEDS)


def which_draw(study: Study) -> str:
    """Show how the draw of each setting was chosen."""
    text = f"""\
## Which draw

The authors' partition is unpublished. So FedAvg is trained for {DRAW_ROUNDS} rounds on each of {len(DRAWS)} draws
(partition seeds {DRAWS[0]} to {DRAWS[-1]}), and the draw whose test metrics are nearest to the published FedAvg (mean
absolute difference in points) is taken before any other method is run on it. Distances between clients: mean
Jensen-Shannon distance of their labels and of their pairs of labels (0 alike, 1 nothing in common); missing: classes
that a client has no image of, on average."""
    return "\n\n".join([text, *(draws_table(study, setting) for setting in SETTINGS)])


def draws_table(study: Study, setting: str) -> str:
    """Show FedAvg on the draws of a setting, with the chosen draw in bold."""
    reported = [published(*dataset_and_beta(setting), "fedavg", metric) for metric in SHOWN]
    measured = ["to published", "macro-F1 cal.", "label distance", "missing", "co-occurrence distance", "images"]
    header = ["draw", *SHOWN.values(), *measured]
    rows = [["published", *map(number, reported), *[""] * len(measured)]]
    for entry in draws(setting):
        record = study.records.get(entry.path)
        taken = entry.draw == study.chosen[setting]
        cells = [NOT_RUN] * (len(header) - 1) if record is None else draw_cells(record)
        name = f"{entry.draw} (taken)" if taken else str(entry.draw)
        rows.append([f"**{cell}**" if taken else cell for cell in [name, *cells]])
    heading, table = f"### {setting}: draws", markdown(header, rows)
    if study.chosen[setting] is not None:
        return f"{heading}\n\n{table}"
    begun = any(entry.path in study.records for entry in draws(setting))
    return f"{heading}\n\n{table if begun else NOT_RUN}\n\nNo draw is taken until all of them have been tried."


def draw_cells(record: Record) -> list[str]:
    """Write the metrics and distances of a draw."""
    partition = record["partition"]
    distances = [partition[name] for name in ("label_distance", "missing_classes", "cooccurrence_distance")]
    digits = (2, 1, 2)
    return [
        *(number(metric_of(record, metric)) for metric in SHOWN),
        number(gap(record)),
        number(metric_of(record, "macro_f1_calibrated")),
        *(number(value, places) for value, places in zip(distances, digits, strict=True)),
        f"{min(partition['images'])} to {max(partition['images'])}",
    ]


def trials(study: Study) -> str:
    """Show the runs that tried out changes; empty if there are none."""
    found = study.trials()
    if not found:
        return ""
    text = """\
## Tried out

Runs with changes of a setting, from which its open choices were made, beside what the paper reports of their method and
with their mean absolute difference from it. No other table shows them."""
    header = ["setting", "row", "changes", "draw", "seed", "rounds", "val. macro-F1", *SHOWN.values(), "to published"]
    rows = [
        [
            *(record["setting"], record["row"], f"`{tried(path, record)}`", str(record["draw"]), str(record["seed"])),
            str(record["config"]["train"]["rounds"]),
            number(100 * record["results"]["val"]["val"]["macro_f1"]),
            *(beside_published(record, metric) for metric in SHOWN),
            number(gap(record)),
        ]
        for path, record in found.items()
    ]
    return f"{text}\n\n{markdown(header, rows, texts=3)}"


def beside_published(record: Record, metric: str) -> str:
    """Write a run's metric, with its method's published value and the difference from it."""
    value = metric_of(record, metric)
    known = published(*dataset_and_beta(record["setting"]), record["row"].partition(":")[0], metric)
    return NOTHING if value is None else Beside(value, None, known).text()


def appendix(study: Study) -> str:
    """List every record behind the page."""
    if not study.records:
        return "## Records\n\nThere are no records yet."
    header = ["record", "row", "draw", "seed", "commit", "seconds"]
    rows = [record_cells(path, record) for path, record in sorted(study.records.items())]
    table = markdown(header, rows, texts=2)
    return f"## Records\n\n{folded(f'All {len(rows)} records, below studies/records/', table)}"


def record_cells(path: Path, record: Record) -> list[str]:
    """Write the line of a record."""
    numbers = [str(record["draw"]), str(record["seed"])]
    return [f"`{path.as_posix()}`", record["row"], *numbers, record["commit"][:SHORT], f"{record['seconds']:.0f}"]
