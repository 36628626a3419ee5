"""The runs behind docs/results.md: settings, rows, partition draws and training seeds, in the order of training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fednca.bench.rows import parse_row, show
from fednca.config import Config, load_config
from fednca.report.published import published

DERMAMNIST = ("dermamnist-0.1", "dermamnist-0.5")
CIFAR10 = ("cifar10-0.5", "cifar10-0.1")
SETTINGS = (*DERMAMNIST, *CIFAR10)
COCO_SAMPLE = {"coco-sample-0.05": "coco-0.05"}  # samples of datasets, and the presets they are trained by
NIH_SAMPLE = {"nih-sample-0.5": "chestxray14-0.5", "nih-sample-0.1": "chestxray14-0.1"}
SAMPLES = COCO_SAMPLE | NIH_SAMPLE
VOC = ("voc-0.05", "voc-0.01")  # the paper's as well, but docs/results.md does not show them yet
# The same images dealt more or less unequally: scikit-learn's digits, which need no files and no GPU.
GRID = {
    f"digits-{beta}-{gamma}": {"partition.beta": beta, "partition.gamma": gamma}
    for gamma, beta in product((0.3, 0.5, 1.0), (0.1, 5.0))
}
SEEDS = (0, 1, 2)
ROUNDS = 100
GRID_ROUNDS = 50
GRID_LONGER = 200  # rounds to see whether FedAvg catches up later

FEDNCA = ("fednca-ml", "fednca-ml:variant=released")
OTHERS = ("fedprox", "fedcurv", "scaffold", "spherefed", "fedlgt")
TABLE = ("fedavg", *FEDNCA, *OTHERS, "centralized")

# Of these draws we choose the one on which FedAvg, after a few rounds, is nearest to the published FedAvg.
DRAWS = (0, 1, 2, 3, 4)
DRAW_ROUNDS = 30
FEW_DRAWS = 3  # methods are compared on these first, and on all draws later

# The paper's ablations, in its order; its last row is the method itself.
COMPONENTS = {
    "FC": "fedavg",
    "ETF": "fednca-ml:head=etf,lambda1=0,lambda2=0",
    "LADM + ETF": "fednca-ml:lambda1=0,lambda2=0",
    "LADM + ETF + L_Neg": "fednca-ml:lambda2=0",
    "LADM + ETF + L_Pos": "fednca-ml:lambda1=0",
    "all": "fednca-ml",
}
QUERIES = {
    "learnable, random": "fednca-ml:lambda1=0,lambda2=0,queries=learnable,query_init=random",
    "learnable, ETF": "fednca-ml:lambda1=0,lambda2=0,queries=learnable",
    "fixed, ETF": "fednca-ml:lambda1=0,lambda2=0",
}
ABLATED = ("dermamnist-0.1", "cifar10-0.5")
HALF = "server_lr=0.5,momentum=0"  # a server that goes half the way to the clients' average
MLP = "fedavg:head=mlp"  # the authors' code calls this FC
EXTRAS = (
    *(MLP, "fedavg-balanced", "fedavg-asl", "ml-decoder", "fedetf"),
    *(f"fedavgm:{HALF}", "fedadam", "fedyogi"),
)
EXTRAS_OF = dict.fromkeys(DERMAMNIST, EXTRAS) | dict.fromkeys(CIFAR10, (MLP,))
GRID_ROWS = ("fedavg", *FEDNCA, COMPONENTS["LADM + ETF"], "ml-decoder", "fedavg-balanced", MLP)
# Choices that might suit FedNCA-ML better than the paper's; validation images decide.
CANDIDATES = (f"fedavgm@fednca-ml:{HALF}", "fednca-ml:criterion=balanced", "fednca-ml:queries=learnable")
WITH_FEATURES = ("FC", "LADM + ETF", "all")  # components whose test features are recorded

# The place of the files, and settings that do not change what is learnt.
COMMON = {"data.root": "data", "train.precision": "bf16", "train.checkpoint_every": 20}
PRETRAINED = {"model.pretrained": "data/resnet18_imagenet.safetensors"}
OF_DATASET = {
    "dermamnist": PRETRAINED,
    "coco-sample": {**PRETRAINED, "data.root": "data/coco"},
    "nih-sample": {**PRETRAINED, "data.name": "folder", "data.root": "data/nih-sample"},
    "voc": {**PRETRAINED, "data.root": "data/voc"},
}
# Real text embeddings for FedLGT, where there are any.
TEXT_TABLES = {
    "cifar10": "data/clip/cifar10.npz",
    "coco-sample": "data/clip/coco80.npz",
    "voc": "data/clip/voc20.npz",
}


@dataclass(frozen=True)
class Entry:
    """One run of the study."""

    setting: str
    row: str
    draw: int
    seed: int
    rounds: int = ROUNDS
    changes: tuple[tuple[str, Any], ...] = ()  # changes of the setting, for a run that tries them out

    @property
    def path(self) -> Path:
        """The path of its record, relative to the folder of records."""
        rounds = "" if self.rounds == ROUNDS else f"-rounds-{self.rounds}"
        tried = "".join(f"-{path.rpartition('.')[2]}-{show(value)}" for path, value in self.changes)
        name = f"draw-{self.draw}-seed-{self.seed}{rounds}{tried}.json"
        return Path(self.setting, parse_row(self.row).folder, name)

    @property
    def keeps_features(self) -> bool:
        """Whether its record includes test features."""
        rows = {COMPONENTS[name] for name in WITH_FEATURES}
        whole = self.rounds == ROUNDS and not self.changes
        return whole and self.setting in ABLATED and self.row in rows and self.seed == SEEDS[0]

    def config(self) -> Config:
        """Return the settings of the run."""
        own = {"partition.seed": self.draw, "seed": self.seed, "train.rounds": self.rounds, **dict(self.changes)}
        row = parse_row(self.row).overrides
        if self.setting in GRID:
            return load_config("demo", {**GRID[self.setting], **row, **own})
        dataset = self.setting.rpartition("-")[0]
        if row["method.name"] == "fedlgt" and dataset in TEXT_TABLES:
            row = {**row, "method.options.text": TEXT_TABLES[dataset]}
        preset = SAMPLES.get(self.setting, self.setting)
        return load_config(preset, {**COMMON, **OF_DATASET.get(dataset, {}), **row, **own})


# The paper leaves CIFAR-10's image size and numbers of composites open. These runs decided what the presets say, before
# any other method was run. FedAvg with the presets' choices is among the draws.
FEWER = (("data.options.train_singles", 1000), ("data.options.train_pairs", 65))
FEWEST = (("data.options.train_singles", 500), ("data.options.train_pairs", 32))
CALIBRATION = tuple(
    Entry(CIFAR10[0], row, 0, 0, DRAW_ROUNDS, (("data.image_size", size), *counts))
    for row, tries in {
        "centralized": ((64, ()), (112, ()), (64, FEWER), (112, FEWER), (64, FEWEST), (224, FEWER)),
        "fedavg": ((112, ()), (112, FEWER), (224, FEWER)),
        MLP: ((64, ()),),
    }.items()
    for size, counts in tries
)

# These runs check whether the demo's learning rate, 0.005, suits FedAvg.
GRID_TRIALS = tuple(
    Entry("digits-0.1-0.5", "fedavg", 0, 0, GRID_ROUNDS, (("train.lr", lr),)) for lr in (0.0005, 0.001, 0.002, 0.01)
)

# Settings in which clients lack classes: longer runs of FedAvg and FedNCA-ML, and FedNCA-ML's candidates.
LACKING = tuple(setting for setting, dealt in GRID.items() if dealt["partition.gamma"] < 1)
GRID_LONG_RUNS = tuple(
    Entry(setting, row, draw, SEEDS[0], GRID_LONGER)
    for draw, setting, row in product(DRAWS[:FEW_DRAWS], LACKING, ("fedavg", FEDNCA[0]))
)
GRID_CANDIDATES = tuple(
    Entry(setting, row, draw, SEEDS[0], GRID_ROUNDS)
    for draw, setting, row in product(DRAWS[:FEW_DRAWS], LACKING, CANDIDATES)
)

Records = Mapping[Path, Mapping[str, Any]]  # by the path of their entry


def draws(setting: str) -> list[Entry]:
    """Return the runs that decide which draw of a setting is chosen."""
    return [Entry(setting, "fedavg", draw, 0, DRAW_ROUNDS) for draw in DRAWS]


def gap(record: Mapping[str, Any]) -> float:
    """Return the mean absolute difference in points between a run's test metrics and its method's published ones."""
    config, method = record["config"], record["row"].partition(":")[0]
    test: dict[str, float] = record["results"]["val"]["test"]
    metrics = ("macro_auc", "macro_f1", "micro_auc", "micro_f1")
    known = {m: published(config["data"]["name"], config["partition"]["beta"], method, m) for m in metrics}
    return sum(abs(100 * test[m] - value) for m, value in known.items() if value is not None) / len(metrics)


def chosen_draw(setting: str, records: Records) -> int | None:
    """Return the draw whose FedAvg is nearest to the published one; None until all draws have been tried.

    Of a sample, which nothing published can be held against, it is the first, and so it is of VOC, whose draws were not
    tried.
    """
    if setting in SAMPLES or setting in VOC:
        return DRAWS[0]
    found = {entry.draw: records.get(entry.path) for entry in draws(setting)}
    gaps = {draw: gap(record) for draw, record in found.items() if record is not None}
    return min(gaps, key=lambda draw: gaps[draw]) if len(gaps) == len(found) else None


def trained_in(setting: str, row: str) -> str:
    """Return the setting whose runs a row shows: `centralized` is the same in all settings of a dataset.

    >>> trained_in("cifar10-0.1", "fedavg"), trained_in("cifar10-0.1", "centralized")
    ('cifar10-0.1', 'cifar10-0.5')
    """
    dataset = setting.rpartition("-")[0]
    alike = [each for each in (*SETTINGS, *SAMPLES, *VOC) if each.rpartition("-")[0] == dataset]
    return alike[0] if row == "centralized" else setting


def rounds_of(setting: str) -> int:
    """Return the number of rounds of a setting's runs."""
    return GRID_ROUNDS if setting in GRID else ROUNDS


def grid() -> list[Entry]:
    """Return the runs on unequally dealt digits, draw by draw, with one seed."""
    places = product(DRAWS[:FEW_DRAWS], GRID, GRID_ROWS)
    whole = [Entry(setting, row, draw, SEEDS[0], GRID_ROUNDS) for draw, setting, row in places]
    return [*whole, *GRID_TRIALS, *GRID_LONG_RUNS, *GRID_CANDIDATES]


def tables(settings: Iterable[str], rows: Iterable[str], records: Records) -> list[Entry]:
    """Return the runs of tables on the draws chosen so far, seed by seed."""
    places = [(trained_in(setting, row), row) for setting in settings for row in rows]
    chosen = {setting: chosen_draw(setting, records) for setting, _ in places}
    found = [(setting, row, chosen[setting]) for setting, row in places]
    return [Entry(setting, row, draw, seed) for seed in SEEDS for setting, row, draw in found if draw is not None]


def spread(setting: str, records: Records, most: int = len(DRAWS)) -> list[Entry]:
    """Return the runs on several draws, with one seed: FedAvg, both variants of FedNCA-ML and the best other method."""
    chosen = chosen_draw(setting, records)
    if chosen is None:
        return []
    drawn = [chosen, *[draw for draw in DRAWS if draw != chosen]][:most]
    best = strongest_other(setting, chosen, records)
    rows = ["fedavg", *FEDNCA, *([best] if best else [])]
    return [Entry(setting, row, draw, SEEDS[0]) for draw in drawn for row in rows]


def strongest_other(setting: str, draw: int, records: Records) -> str | None:
    """Return the method other than FedAvg and FedNCA-ML with the best mean macro-F1 on validation images."""
    means = {}
    for row in OTHERS:
        found = [records.get(Entry(setting, row, draw, seed).path) for seed in SEEDS]
        values = [record["results"]["val"]["val"]["macro_f1"] for record in found if record is not None]
        if len(values) == len(SEEDS):
            means[row] = sum(values) / len(values)
    return max(means, key=lambda row: means[row]) if len(means) == len(OTHERS) else None


def plan(records: Records) -> list[Entry]:
    """Return all runs that can be planned so far, the most important first, each once."""
    found: list[Entry] = []
    for settings, before in ((DERMAMNIST, ()), (CIFAR10, CALIBRATION)):
        found += before
        found += [entry for setting in settings for entry in draws(setting)]
        found += tables(settings, TABLE, records)
    found += tables(ABLATED, COMPONENTS.values(), records)
    found += [entry for most in (FEW_DRAWS, len(DRAWS)) for s in SETTINGS for entry in spread(s, records, most)]
    found += tables(DERMAMNIST, (*CANDIDATES, *EXTRAS), records)
    found += tables(CIFAR10, [MLP], records)
    found += tables(COCO_SAMPLE, TABLE, records)
    found += tables(ABLATED, QUERIES.values(), records)
    found += tables(NIH_SAMPLE, TABLE, records)
    found += grid()
    return list(dict.fromkeys(found))


def voc(records: Records) -> list[Entry]:
    """Return the runs of VOC's tables: trained after the plan, and not counted in it while no page shows them."""
    return tables(VOC, TABLE, records)


def eventual_runs() -> int:
    """Count the runs of the final plan, when all draws are chosen and all strongest other methods are known."""
    asked = [(SETTINGS, TABLE), (ABLATED, COMPONENTS.values()), (ABLATED, QUERIES.values())]
    asked += [(DERMAMNIST, CANDIDATES), (tuple(SAMPLES), TABLE)]
    asked += [((setting,), rows) for setting, rows in EXTRAS_OF.items()]
    on_one_draw = {(trained_in(setting, row), row) for settings, rows in asked for setting in settings for row in rows}
    on_others = len(SETTINGS) * (len(DRAWS) - 1) * len(("fedavg", *FEDNCA, "the strongest other"))
    return len(CALIBRATION) + len(SETTINGS) * len(DRAWS) + len(on_one_draw) * len(SEEDS) + on_others + len(grid())
