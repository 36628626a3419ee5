"""Groups of runs that differ only in the seed: a method with its options is one line in every figure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednca.bench.cells import settings
from fednca.bench.rows import show
from fednca.config import Config, read_toml
from fednca.runs import Run

# Settings that say how a run is executed and watched, and do not change what it learns.
EXECUTION = {
    *("seed", "device", "engine", "workers", "threads", "data.root", "data.cache"),
    *("train.checkpoint_every", "evaluate.batch_size", "evaluate.collapse"),
}
MOST_NAMED = 4  # most settings that a label names


@dataclass(frozen=True)
class Group:
    """Runs of the same method and settings, sorted by seed."""

    label: str
    runs: list[Run]
    settings: dict[str, Any]

    @property
    def run(self) -> Run:
        """The run that represents the group: the first finished one, else the first."""
        return next((run for run in self.runs if run.finished), self.runs[0])


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Open run folders, each once; a folder that holds run folders at any depth means all of them."""
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        here = (path / "config.toml").is_file()
        found = [] if here else sorted(config.parent for config in path.rglob("config.toml") if is_of_run(config))
        for folder in found or [path]:
            folders.setdefault(folder.resolve(), folder)
    return [Run(folder) for folder in folders.values()]


def is_of_run(config: Path) -> bool:
    """Return whether a config.toml belongs to a run; Flower, for one, writes files of the same name."""
    return read_toml(config).keys() <= Config.model_fields.keys()


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group the runs that differ only in the seed, in order of first appearance."""
    found: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in runs:
        own = what_it_is(run.config)
        found.setdefault(repr(own), (own, []))[1].append(run)
    titles = [members[0].title for _, members in found.values()]
    groups = []
    for title, (own, members) in zip(titles, found.values(), strict=True):
        twins = [other for name, (other, _) in zip(titles, found.values(), strict=True) if name == title]
        apart = [f"{path.rpartition('.')[2]}={show(own.get(path))}" for path in differing(twins)]
        label = f"{title}: {', '.join(apart)}" if apart else title
        if len(apart) > MOST_NAMED:
            label = f"{title} in {members[0].folder}"
        groups.append(Group(label, sorted(members, key=lambda run: run.config.seed), own))
    return groups


def what_it_is(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a run learns, by dotted path."""
    return {path: value for path, value in settings(config).items() if path not in EXECUTION}


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the paths whose values differ somewhere.

    >>> differing([{"train.lr": 0.1, "seed": 0}, {"train.lr": 0.2, "seed": 0}])
    ['train.lr']
    """
    paths = dict.fromkeys(path for own in settings for path in own)
    return [path for path in paths if any(own.get(path) != settings[0].get(path) for own in settings)]


def setting(group: Group) -> str:
    """Return a group's data and partition settings as a text: groups with equal texts use the same images."""
    return repr({path: value for path, value in group.settings.items() if path.startswith(("data.", "partition."))})
