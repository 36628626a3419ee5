"""The commands for real federations: `fednca flower init`, `check` and `what-leaves`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.base.errors import FedncaError
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
    check.add_argument("folder", metavar="DIR", help="the federation's folder, or only its server's or a site's")
    leaves = act("what-leaves", run_what_leaves, "Print what leaves a site, and how many bytes it is.")
    leaves.add_argument("--preset", metavar="PRESET", default="demo", help="preset or TOML file (default: demo)")
    leaves.add_argument("--classes", metavar="N", type=int, help="number of classes (default: as in the dataset)")
    add_config_flags(leaves)


def add_init_flags(init: ArgumentParser) -> None:
    """Add the flags of `init`."""
    init.add_argument("folder", metavar="DIR", help="folder to write, new or empty")
    init.add_argument("--sites", metavar="NAME", nargs="+", required=True, help="names of all sites")
    init.add_argument(
        "--host",
        metavar="NAME_OR_IP",
        nargs="+",
        default=["localhost"],
        help="the server's names or addresses: sites call the first, certificates hold for all (default: localhost)",
    )
    init.add_argument("--port", metavar="N", type=int, default=8000, help="the SuperLink's port (default: 8000)")
    init.add_argument("--days", metavar="N", type=int, default=30, help="days until certificates expire (default: 30)")
    presets = ", ".join(preset_names())
    init.add_argument(
        "--preset",
        metavar="PRESET",
        dest="config",
        default="demo",
        help=f"what is trained: a preset ({presets}) or a TOML file (default: demo)",
    )
    init.add_argument("--insecure", action="store_true", help="use no encryption and no keys; never with real data")


def run_init(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Write the folder of a trial federation."""
    _need_flower()
    from fednca.flower.trial import Trial, write_trial

    folder = write_trial(
        Trial(
            folder=Path(arguments.folder),
            sites=arguments.sites,
            hosts=arguments.host,
            port=arguments.port,
            days=arguments.days,
            config=arguments.config,
            insecure=arguments.insecure,
        )
    )
    if arguments.insecure:
        warn(console, "nothing is encrypted, and whoever reaches the port can be a site; use no real data")
    say(console, f"wrote {folder}; edit each sites/*/site.toml, then follow {folder / 'COMMANDS.md'}")


def run_check(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print `ready`, or raise an error that lists every problem."""
    _need_flower()
    from rich.progress import track

    from fednca.flower.ready import find_problems, is_insecure

    folder = Path(arguments.folder)
    quiet = not console.is_terminal

    def watch(steps: Iterable[None], what: str, total: int) -> Iterable[None]:
        return track(steps, what, total, console=console, transient=True, disable=quiet)

    problems = find_problems(folder, watch)
    if problems:
        head = f"{len(problems)} problems:\n  " if len(problems) > 1 else ""
        raise FedncaError(head + "\n  ".join(problems))
    if is_insecure(folder):
        warn(console, "this federation is insecure; use no real data")
    say(console, "ready")


def run_what_leaves(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print a table of what a site sends."""
    config = load_config(arguments.preset, overrides)
    classes = count_classes(arguments.classes, config.data.name)
    _need_flower()
    from rich.table import Table

    from fednca.flower.uploads import what_leaves

    title = f"what leaves a site: {config.method.name}, {config.model.backbone}, {classes} classes"
    table = Table(title=title, title_justify="left")
    for column in ("when", "what", "numbers", "as sent"):
        table.add_column(column, justify="right" if column in {"numbers", "as sent"} else "left")
    for sent in what_leaves(config, classes):
        sizes = ("few", "few") if sent.numbers is None else (f"{sent.numbers:,} B", f"{sent.record:,} B")
        table.add_row(sent.when, sent.what, *sizes)
    console.print(table)
    say(console, "No image, no label of a single image and no file name leaves the site.")


def count_classes(given: int | None, dataset: str) -> int:
    """Return the number of classes: as given, else the dataset's."""
    from fednca.data.sources import get_source

    if given is not None and not 2 <= given <= MOST_CLASSES:
        raise FedncaError(f"--classes is {given}; give 2 to {MOST_CLASSES}")
    classes = len(get_source(dataset).CLASSES) if given is None else given
    if not classes:
        raise FedncaError(f"dataset '{dataset}' has no fixed number of classes; give --classes")
    return classes


def say(console: "Console", text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def warn(console: "Console", text: str) -> None:
    """Print a warning as it is."""
    say(console, f"warning: {text}")


def _need_flower() -> None:
    """Say how to install Flower where it is missing."""
    from fednca.base.packages import needed

    needed("flwr", "flower")
