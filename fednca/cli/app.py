"""The command line: parse, call, print."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.files import resuming
from fednca.cli import flower_commands as flower_commands
from fednca.cli import report_commands as report_commands
from fednca.cli.flags import (
    Parser,
    add_config_flags,
    add_fields,
    add_preset,
    collect_overrides,
    not_empty,
    whole,
    with_dashes,
)
from fednca.cli.output import OutputError, standard_output
from fednca.cli.use_commands import add_commands
from fednca.config import Config, leaves, load_config, preset_names, source_name
from fednca.runs.loggers import LOGGERS, create_logger

if TYPE_CHECKING:
    from rich.console import Console

    from fednca.bench.cells import Bench
    from fednca.runs import Run

DEMO_METHODS = ("fedavg", "fednca-ml")
PREPARED = (
    "data.root",
    "data.image_size",
    "data.on_corrupt",
    "data.cache",
)  # fields that decide how images are decoded
Overrides = dict[str, Any]


class IncompleteError(FedncaError):
    """Some runs of a bench failed; all others are done."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done; 1: some runs of a bench failed, or the reader of a pipe has gone, as in `fednca methods | head`; 2: a
    mistake, which one sentence explains; 130: Ctrl-C.
    """
    if sys.stdout is None:  # closed by the program that started this one
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still prints the rest
    try:
        with standard_output():
            run_command(list(sys.argv[1:] if argv is None else argv))
    except FedncaError as error:
        if isinstance(error, OutputError) and error.unread:
            return 1
        sys.stderr.write(f"fednca: {error}\n")
        return 1 if isinstance(error, IncompleteError) else 2
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"fednca: stopped{stop}\n")
        return 130
    except (OSError, MemoryError) as error:  # not explained anywhere closer to the cause
        sys.stderr.write(f"fednca: {str(error) or 'not enough memory'}\n")
        return 2
    return 0


def run_command(argv: list[str]) -> None:
    """Parse the arguments and call the command they name."""
    parser, commands = build_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise unknown_name("command", argv[0], commands, "fednca --help")
    arguments, rest = parser.parse_known_args([with_dashes(word) for word in argv])
    if arguments.version:
        sys.stdout.write(f"fednca {version('fednca')}\n")
        return
    if "command" not in arguments:
        if rest:
            raise unknown_name("flag", rest[0], ["--help", "--version"])
        parser.print_help()
        return
    known = list(arguments.parser._option_string_actions)  # argparse has no public list of a parser's flags
    if "preset" in arguments:
        overrides = collect_overrides(arguments.preset, arguments, rest, known)
    elif rest:
        raise unknown_name("argument", rest[0], known)
    else:
        overrides = {}
    from rich.console import Console

    arguments.command(arguments, overrides, Console(emoji=False))  # else `my:M: …` shows as `myⓂ …`


def build_parser() -> tuple[Parser, dict[str, ArgumentParser]]:
    """Return the parser and its commands by name."""
    parser = Parser(prog="fednca", description="Federated multi-label image classification.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)

    def add(name: str, command: Callable[..., None], text: str) -> ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(command=command, parser=sub)
        return sub

    demo = add("demo", run_demo, "Train FedAvg and FedNCA-ML with ten clients on handwritten digits, and compare them.")
    demo.set_defaults(preset="demo")
    run = add("run", run_train, "Train one method with one seed.")
    bench = add(
        "bench", run_bench, "Train every method and seed of a setting as one table; repeat the command to go on."
    )
    for sub in (run, bench):
        add_preset(sub)
    for sub, place in {demo: "runs/demo", run: "runs/DATASET-BETA/METHOD-seedN"}.items():
        sub.add_argument("--out", metavar="DIR", type=not_empty, help=f"folder to write to (default: {place})")
        add_config_flags(sub)
    add_bench_flags(bench)
    data = add("data", prepare_data, "Fetch a dataset and decode its images, or say which files are missing.")
    data.add_argument("action", metavar="prepare", choices=["prepare"], help="the only action so far")
    data.add_argument("data.name", metavar="NAME", help="a dataset, as listed by `fednca datasets`")
    data.set_defaults(preset="demo")  # required by the parser; nothing of it is used
    data.epilog = "Set the dataset's own options as --data.OPTION VALUE; `fednca datasets NAME` lists them."
    add_fields(data, [(path, field) for path, field in leaves() if path in PREPARED])
    again = add("resume", run_resume, "Go on with an interrupted run.")
    again.add_argument("folder", metavar="DIR", help="folder of the run")
    for sub in (run, again):
        sub.add_argument(
            "--log", action="append", choices=LOGGERS, default=[], help="also log every round to this tool"
        )
    report_commands.add_commands(add)
    add_commands(add)
    flower_commands.add_commands(add)
    return parser, dict(commands.choices)


def add_bench_flags(bench: ArgumentParser) -> None:
    """Add the flags that `bench` has besides the config's fields."""
    bench.add_argument(
        "--methods",
        metavar="METHOD",
        nargs="+",
        default=["all"],
        help="methods, each as NAME[@LEARNER][+CLOSING][:option=value,...]; @LEARNER takes head and local loss from "
        "another method, +CLOSING its closing; `all` (default) is every method with its defaults",
    )
    bench.add_argument(
        "--seeds",
        metavar="N|A,B,...",
        default="3",
        help="number of seeds, as in 3 (the default), or the seeds, as in 4,7",
    )
    bench.add_argument(
        "--at-once",
        metavar="N",
        type=whole(1),
        help="runs to train at the same time (default: as many as fit on a GPU; 1 on a CPU)",
    )
    bench.add_argument(
        "--out", metavar="DIR", type=not_empty, help="folder to write to, or to go on with (default: runs/bench/PRESET)"
    )
    add_config_flags(bench)


def run_train(arguments: Namespace, overrides: Overrides, console: "Console") -> None:
    """Train one run and show its results."""
    config = load_config(arguments.preset, overrides)
    from fednca.cli.progress import watching
    from fednca.runs import train
    from fednca.runs.folder import default_folder

    folder = Path(arguments.out or default_folder(config))
    loggers = list(map(create_logger, arguments.log))
    with watching(console) as view, tell_how_to_resume(folder):
        run = train(config, folder, [view, *loggers])
    show_results(run, console)


def run_resume(arguments: Namespace, overrides: Overrides, console: "Console") -> None:
    """Go on with a run and show its results."""
    from fednca.cli.progress import watching
    from fednca.runs import resume

    loggers = list(map(create_logger, arguments.log))
    with watching(console) as view, tell_how_to_resume(Path(arguments.folder)):
        run = resume(arguments.folder, [view, *loggers])
    show_results(run, console)


def run_demo(arguments: Namespace, overrides: Overrides, console: "Console") -> None:
    """Train both methods of the demo with the same clients, compare them, and write their report."""
    config = load_config("demo", {"evaluate.collapse": True} | overrides)
    from fednca.cli.progress import watching
    from fednca.data.load import federate
    from fednca.report.page import write_page
    from fednca.report.tables import partition_table, results_table
    from fednca.runs import train

    folder = Path(arguments.out) if arguments.out else free_folder(Path("runs/demo"))
    methods = [config.method.name] if "method.name" in overrides else DEMO_METHODS
    console.print(partition_table(federate(config)), "")
    runs = []
    for method in methods:
        with watching(console) as view, tell_how_to_resume(folder / method):
            runs.append(train(config.replace({"method.name": method}), folder / method, [view]))
    title = f"test metrics in percent, at the best of {config.train.rounds} rounds by validation"
    console.print("", results_table(title, {run.title: run.results["val"] for run in runs}))
    console.print("run folders:", *(str(run.folder) for run in runs), highlight=False, markup=False, soft_wrap=True)
    write_page(runs, folder / "report.html")
    console.print(f"report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def run_bench(arguments: Namespace, overrides: Overrides, console: "Console") -> None:
    """Train the unfinished runs of a bench, then show mean and deviation of all finished ones."""
    from fednca.bench.cells import Bench, plan_bench
    from fednca.bench.local import train_bench
    from fednca.bench.rows import parse_seeds
    from fednca.bench.view import view_for

    folder = Path(arguments.out or Path("runs") / "bench" / source_name(arguments.preset))
    bench = plan_bench(arguments.preset, overrides, arguments.methods, parse_seeds(arguments.seeds), folder)
    cells = bench.cells()
    try:
        outcome = train_bench(bench, view_for(console, cells), arguments.at_once)
    except OutputError as error:
        raise FedncaError(f"{error}; repeat the command to go on") from None
    if outcome.stopped:
        done = sum(cell.finished for cell in cells)
        raise KeyboardInterrupt(f"; {done} of {len(cells)} runs are done; repeat the command to go on")
    show_bench(Bench.read(folder), console)
    if outcome.failed:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in outcome.failed.items())
        failed = f"{len(outcome.failed)} of {len(cells)} runs failed"
        raise IncompleteError(f"{failed}; repeat the command to try them again:{reasons}")


def prepare_data(arguments: Namespace, overrides: Overrides, console: "Console") -> None:
    """Fetch the files that can be fetched, then decode and check the images of every split."""
    from fednca.cli.progress import watching
    from fednca.data.load import data_root, load_dataset, unreadable_note
    from fednca.data.sources import get_source

    name = overrides["data.name"]
    presets = (preset for preset in map(load_config, preset_names()) if preset.data.name == name)
    config = next(presets, Config()).replace(overrides)  # so that a run of the preset finds the decoded images
    source, root = get_source(name), data_root(config)
    with watching(console) as view:
        if source.missing(root):
            source.prepare(root, view.on_prepare)
        dataset = load_dataset(config, view.on_prepare, verify=True)
    if note := unreadable_note(dataset):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    parts = {part: getattr(dataset, part) for part in ("train", "val", "test")}
    sizes = ", ".join(f"{len(split)} {part}" for part, split in parts.items() if split is not None)
    console.print(f"{dataset.name} is ready: {sizes}, {len(dataset.classes)} classes", highlight=False, markup=False)


def show_results(run: "Run", console: "Console") -> None:
    """Print the final table of a run and its folder."""
    from fednca.report.tables import selections_table

    title = f"{run.title} on {run.config.data.name}: test metrics in percent, by how the round is chosen"
    console.print("", selections_table(title, run.results))
    console.print(f"run folder: {run.folder}", highlight=False, markup=False, soft_wrap=True)


def show_bench(bench: "Bench", console: "Console") -> None:
    """Print the table of a bench's finished runs, as `fednca table` does, and its folder."""
    from fednca.report.comparison import compare, to_text

    rounds = bench.config.train.rounds
    title = f"{bench.preset}: test metrics in percent, at the best of {rounds} rounds by validation\n"
    console.print("", title, highlight=False, markup=False, sep="\n", soft_wrap=True)
    console.print(to_text(compare(bench)), end="", highlight=False, soft_wrap=True)
    console.print(f"run folders: {bench.folder}", highlight=False, markup=False, soft_wrap=True)


def free_folder(folder: Path) -> Path:
    """Return the folder if it does not exist yet, else the first free one of NAME-2, NAME-3 and so on."""
    number = 2
    found = folder
    while found.exists():
        found = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return found


@contextmanager
def tell_how_to_resume(folder: Path) -> Iterator[None]:
    """Add how to resume the run to the message for Ctrl-C, a full GPU or a lost output."""
    from torch import OutOfMemoryError

    try:
        yield
    except (KeyboardInterrupt, OutOfMemoryError, OutputError) as error:
        begun = (folder / "config.toml").exists()
        way_on = f"; go on with {resuming(folder)}" if begun else ""
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(way_on) from None
        if isinstance(error, OutputError):
            raise FedncaError(f"{error}{way_on}") from None
        way_out = "free some of it, or use a smaller batch_size or image_size"
        raise FedncaError(f"the GPU's memory is full; {way_out}{way_on}") from None
