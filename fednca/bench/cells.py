"""A bench: every method and seed of a setting, each an ordinary run folder; calling it again goes on with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fednca.base.errors import FedncaError
from fednca.base.files import named_in_utf8, write_atomic
from fednca.bench.rows import Row, parse_row, parse_rows, show
from fednca.config import Config, build_config, leaves, load_config
from fednca.data.load import data_options
from fednca.methods import create_method
from fednca.methods.contract import options_of
from fednca.methods.registry import option_owners
from fednca.runs import Run
from fednca.runs.folder import read_json

OWN_SETTINGS = {
    "seed": "--seeds",
    "method.name": "--methods",
    "method.learner": "--methods NAME@LEARNER",
    "method.options": "--methods NAME:option=value",
    "method.learner_options": "--methods NAME@LEARNER:learner.option=value",
    "method.closing": "--methods NAME+CLOSING",
    "method.closing_options": "--methods NAME+CLOSING:closing.option=value",
}


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a bench: a row with a seed."""

    row: Row
    seed: int
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        """The run's name for people."""
        return f"{self.row.text}, seed {self.seed}"

    @property
    def begun(self) -> bool:
        """Whether the run has been started."""
        return (self.folder / "config.toml").exists()

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the results written."""
        return (self.folder / "results.json").exists()


@dataclass(frozen=True)
class Bench:
    """The runs of a folder, finished or not, and the setting they share."""

    folder: Path
    preset: str
    overrides: Mapping[str, Any]
    config: Config  # shared by all runs, except for method and seed
    rows: list[Row]
    seeds: list[int]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a bench from its `bench.json`."""
        if not (folder / "bench.json").is_file():
            raise FedncaError(f"'{folder}' is not the folder of a bench: it has no bench.json")
        note = read_json(folder / "bench.json")
        try:
            rows = [parse_row(text) for text in note["rows"]]
            return cls(folder, note["preset"], note["overrides"], build_config(note["config"]), rows, note["seeds"])
        except (KeyError, TypeError, AttributeError):
            raise FedncaError(
                f"'{folder / 'bench.json'}' is damaged; restore it, or start the bench in another folder"
            ) from None

    def save(self) -> None:
        """Write `bench.json`, keeping the rows and seeds that it already names."""
        older = Bench.read(self.folder) if (self.folder / "bench.json").exists() else self
        note = {
            "preset": self.preset,
            "overrides": dict(self.overrides),
            "rows": list(dict.fromkeys(row.text for row in [*older.rows, *self.rows])),
            "seeds": sorted({*older.seeds, *self.seeds}),
            "config": self.config.model_dump(mode="json"),
        }
        write_atomic(self.folder / "bench.json", json.dumps(note, indent=1).encode())

    def cell(self, row: Row, seed: int) -> Cell:
        """Return the run of a row and seed."""
        config = self.config.replace({**row.overrides, "seed": seed})
        return Cell(row, seed, config, self.folder / row.folder / f"seed-{seed}")

    def cells(self) -> list[Cell]:
        """Return all runs, seed by seed, so that a stopped bench has complete seeds."""
        return [self.cell(row, seed) for seed in self.seeds for row in self.rows]

    def runs(self) -> dict[str, dict[int, Run]]:
        """Return the finished runs by row and seed."""
        cells = {row.text: [self.cell(row, seed) for seed in self.seeds] for row in self.rows}
        return {text: {cell.seed: Run(cell.folder) for cell in own if cell.finished} for text, own in cells.items()}


def plan_bench(
    preset: str, overrides: Mapping[str, Any], methods: Sequence[str], seeds: Sequence[int], folder: str | Path
) -> Bench:
    """Return the bench asked for, after checking it by itself and against what the folder already holds."""
    for path, instead in OWN_SETTINGS.items():
        if path in overrides:
            setting, way_out = as_given(path, overrides[path], instead)
            raise FedncaError(f"setting '{setting}' is chosen for each run of a bench; use {way_out} instead")
    config = load_config(preset, overrides)
    check_method(preset, config)
    bench = Bench(Path(folder), preset, overrides, config, parse_rows(methods), list(dict.fromkeys(seeds)))
    cells = bench.cells()
    for cell in cells[: len(bench.rows)]:
        settings(cell.config)  # raises an error if one is wrong
    check_folder(bench)
    for cell in cells:
        if cell.begun:
            check_same(cell.folder, Run(cell.folder).config, cell.config)
    return bench


def as_given(path: str, value: Any, instead: str) -> tuple[str, str]:  # noqa: ANN401
    """Return a setting and its replacement as a user writes them; of several options the first one.

    >>> as_given("method.options", {"head": "etf"}, OWN_SETTINGS["method.options"])
    ('method.head', '--methods NAME:head=etf')
    """
    if not isinstance(value, Mapping) or not value:
        return path, instead
    name = next(iter(value))
    owner = path.removeprefix("method.").removesuffix("options").rstrip("_") or "method"
    return f"{owner}.{name}", instead.replace("option=value", f"{name}={show(value[name])}")


def check_method(preset: str, config: Config) -> None:
    """Refuse a config that sets options of its method: the rows of a bench would silently drop them."""
    plain = config.replace({"method.options": {}, "method.learner_options": {}, "method.closing_options": {}})
    before, now = settings(plain), settings(config)
    for path in now:
        if now[path] != before[path]:
            owner = path.rpartition(".")[0]
            raise FedncaError(
                f"'{preset}' sets {path} = {now[path]}, which is chosen for each run of a bench; "
                f"take it out and use {OWN_SETTINGS[owner]}"
            )


def check_folder(bench: Bench) -> None:
    """Refuse a folder that holds other things, or a bench with other settings."""
    folder, row, seed = named_in_utf8(bench.folder), bench.rows[0], bench.seeds[0]
    if (folder / "bench.json").exists():
        check_same(folder, Bench.read(folder).cell(row, seed).config, bench.cell(row, seed).config)
    elif folder.is_dir() and any(path.name not in {".lock", "bench.json.partial"} for path in folder.iterdir()):
        raise FedncaError(f"'{folder}' holds other things than a bench; choose another --out")


def check_same(folder: Path, found: Config, asked: Config) -> None:
    """Refuse to go on with changed settings, and name the first that differs."""
    before, now = settings(found), settings(asked)
    for path in {**now, **before}:
        if before.get(path) != now.get(path):
            raise FedncaError(
                f"'{folder}' was started with {path} = {before.get(path)}, not {now.get(path)}; "
                "use the same settings or another --out"
            )


def settings(config: Config) -> dict[str, Any]:
    """Return all settings by dotted path; options of method, learner and dataset include their defaults."""
    values, found = config.model_dump(mode="json"), {}
    for path, _ in leaves():
        node = values
        for part in path.split("."):
            node = node[part]
        found[path] = node
    if config.partition.kind == "natural":
        del found["partition.clients"]  # the data decide it
    method, owned = create_method(config), {"data.options": data_options(config).model_dump()}
    for place, parts in option_owners(config.method).items():
        owned[f"method.{place}"] = {
            name: getattr(part, name)
            for part in (method.parts[each] for each in parts if each in method.parts)
            for name in options_of(part)
        }
    return found | {f"{path}.{name}": value for path, own in owned.items() for name, value in own.items()}
