"""The commands for real federations: `fednca flower init`, `check` and `what-leaves`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.base.errors import FedncaError
from fednca.base.packages import needed
from fednca.cli.flags import add_config_flags
from fednca.config import load_config, preset_names

if TYPE_CHECKING:
    from rich.console import Console

MOST_CLASSES = 30_000  # beyond, what a site sends does not fit into the memory of many machines

Add = Callable[[str, Callable[..., None], str], ArgumentParser]


def add_commands(add: Add) -> None:
    """Add `flower` and its actions; `add` makes a command from a name, a function and a help text."""
    flower = add("flower", run_init, "Set up a real federation over Flower: certificates, keys, settings, commands.")
    actions = flower.add_subparsers(title="actions", metavar="ACTION", required=True)

    def act(name: str, command: Callable[..., None], text: str) -> ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(command=command)
        return sub

    add_init_flags(act("init", run_init, "Write everything that a trial federation needs into a new folder."))
    check = act("check", run_check, "Check certificates, keys, settings and images; print `ready`, or what is wrong.")
    check.add_argument(
        "folder", metavar="DIR", type=Path, help="the federation's folder, or only its server's or a site's"
    )
    leaves = act("what-leaves", run_what_leaves, "Print what leaves a site, and how many bytes it is.")
    leaves.add_argument("--preset", metavar="PRESET", default="demo", help="preset or TOML file (default: demo)")
    leaves.add_argument("--classes", metavar="N", type=int, help="number of classes (default: as in the dataset)")
    add_config_flags(leaves)


def add_init_flags(init: ArgumentParser) -> None:
    """Add the flags of `init`, each under the name that it has in a Trial."""
    preset = f"what is trained: a preset ({', '.join(preset_names())}) or a TOML file (default: demo)"
    hosts = "the server's names or addresses: sites call the first, certificates hold for all (default: localhost)"
    add = init.add_argument
    add("folder", metavar="DIR", type=Path, help="folder to write, new or empty")
    add("--sites", metavar="NAME", nargs="+", required=True, help="names of all sites")
    add("--host", metavar="NAME_OR_IP", dest="hosts", nargs="+", default=["localhost"], help=hosts)
    add("--port", metavar="N", type=int, default=8000, help="the SuperLink's port (default: 8000)")
    add("--days", metavar="N", type=int, default=30, help="days until certificates expire (default: 30)")
    add("--preset", metavar="PRESET", dest="config", default="demo", help=preset)
    add("--insecure", action="store_true", help="use no encryption and no keys; never with real data")


def run_init(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Write the folder of a trial federation."""
    needed("flwr", "flower")
    from fednca.flower.trial import Trial, write_trial

    folder = write_trial(Trial(**{field.name: getattr(arguments, field.name) for field in fields(Trial)}))
    if arguments.insecure:
        warn(console, "nothing is encrypted, and whoever reaches the port can be a site; use no real data")
    say(console, f"wrote {folder}; edit each sites/*/site.toml, then follow {folder / 'COMMANDS.md'}")


def run_check(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print `ready`, or raise an error that lists every problem."""
    needed("flwr", "flower")
    from rich.progress import track

    from fednca.flower.ready import find_problems, is_insecure

    def watch(steps: Iterable[None], what: str, total: int) -> Iterable[None]:
        return track(steps, what, total, console=console, transient=True, disable=not console.is_terminal)

    if problems := find_problems(arguments.folder, watch):
        head = f"{len(problems)} problems:\n  " if len(problems) > 1 else ""
        raise FedncaError(head + "\n  ".join(problems))
    if is_insecure(arguments.folder):
        warn(console, "this federation is insecure; use no real data")
    say(console, "ready")


def run_what_leaves(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print a table of what a site sends."""
    config = load_config(arguments.preset, overrides)
    classes = count_classes(arguments.classes, config.data.name)
    needed("flwr", "flower")
    from rich.table import Table

    from fednca.flower.uploads import what_leaves

    title = f"what leaves a site: {config.method.name}, {config.model.backbone}, {classes} classes"
    table = Table(title=title, title_justify="left")
    for column in ("when", "what"):
        table.add_column(column)
    for column in ("numbers", "as sent"):
        table.add_column(column, justify="right")
    for sent in what_leaves(config, classes):
        sizes = ("few" if size is None else f"{size:,} B" for size in (sent.numbers, sent.record))
        table.add_row(sent.when, sent.what, *sizes)
    console.print(table)
    say(console, "No image, no label of a single image and no file name leaves the site.")


def count_classes(given: int | None, dataset: str) -> int:
    """Return the number of classes: as given, else the dataset's."""
    from fednca.data.sources import get_source

    if given is not None and not 2 <= given <= MOST_CLASSES:
        raise FedncaError(f"--classes is {given}; give 2 to {MOST_CLASSES}")
    classes = given or len(get_source(dataset).CLASSES)
    if not classes:
        raise FedncaError(f"dataset '{dataset}' has no fixed number of classes; give --classes")
    return classes


def say(console: "Console", text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def warn(console: "Console", text: str) -> None:
    """Print a warning as it is."""
    say(console, f"warning: {text}")
