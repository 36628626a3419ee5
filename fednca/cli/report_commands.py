"""The commands that show things: `table`, `partition`, `methods`, `datasets`, `report` and `figures`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.cli.flags import add_config_flags, add_preset, not_empty, whole
from fednca.config import load_config, source_name

if TYPE_CHECKING:
    from rich.console import Console

Add = Callable[[str, Callable[..., None], str], ArgumentParser]


def add_commands(add: Add) -> None:
    """Add the commands and their flags; `add` creates a command from its name, function and help text."""
    table = add("table", show_table, "Print the results of a bench, beside the paper's numbers where it has them.")
    table.add_argument("folder", metavar="DIR", help="folder of the bench")
    table.add_argument(
        "--select",
        choices=["val", "paper", "last"],
        default="val",
        help="round to report: best on validation (default), best on test as in the paper's code, or last",
    )
    table.add_argument("--format", choices=["text", "markdown", "csv", "latex"], default="text")
    deal = add("partition", show_partition, "Show which client would get which images, without training.")
    add_preset(deal)
    deal.add_argument(
        "--out", metavar="DIR", type=not_empty, help="folder to write to (default: runs/partitions/PRESET)"
    )
    add_config_flags(deal)
    methods = add("methods", show_methods, "List the methods, or the options of one.")
    methods.add_argument(
        "--classes",
        metavar="N",
        type=whole(2, 512),
        default=20,
        help="number of classes when sizing uploads (default: 20)",
    )
    datasets = add("datasets", show_datasets, "List the datasets, or the options of one.")
    datasets.add_argument("--root", metavar="DIR", help="folder that holds one folder per dataset (default: data)")
    for sub in (methods, datasets):
        sub.add_argument("name", metavar="NAME", nargs="?", help="show the options of this one only")
    report = add("report", run_report, "Write one HTML page that compares runs; it opens without a network.")
    figures = add(
        "figures", run_figures, "Draw features and class maps of test images for trained models, as PNG and SVG."
    )
    for sub in (report, figures):
        sub.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or a folder that holds several")
    report.add_argument("-o", "--out", metavar="FILE", help="page to write (default: RUN/report.html)")
    report.add_argument(
        "--no-pictures", action="store_true", help="leave out the pictures of test images, which need the data"
    )
    report.add_argument("--watch", action="store_true", help="rewrite the page every 30 s until all runs are finished")
    figures.add_argument("-o", "--out", metavar="DIR", help="folder to write to (default: RUN/figures)")
    figures.add_argument(
        "--images",
        metavar="N",
        type=whole(1),
        default=2000,
        help="take features of at most this many test images (default: 2000)",
    )


def show_table(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print the table of a bench."""
    from fednca.bench.cells import Bench
    from fednca.report.comparison import FORMATS, compare

    lines = compare(Bench.read(Path(arguments.folder)), arguments.select)
    text = FORMATS[arguments.format](lines, arguments.select)
    console.print(text, end="", highlight=False, markup=arguments.format == "text", soft_wrap=True)


def show_partition(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print which client gets which images, and write facts and pictures about it."""
    config = load_config(arguments.preset, overrides)
    from fednca.cli.progress import watching
    from fednca.data.load import federate, sites_note
    from fednca.report.partition import write_report
    from fednca.report.tables import partition_table

    with watching(console) as view:
        federation = federate(config, view.on_prepare)
    console.print(partition_table(federation))
    if note := sites_note(config, federation):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    folder = Path(arguments.out or Path("runs") / "partitions" / source_name(arguments.preset))
    report = write_report(federation, folder, config.partition.model_dump())
    for fact in ("label_distance", "cooccurrence_distance", "missing_classes"):
        value = "not defined" if report[fact] is None else f"{report[fact]:.3f}"
        console.print(f"{fact.replace('_', ' ')} of the clients: {value}", highlight=False, markup=False)
    without = {part: "not defined" if share is None else f"{share:.0%}" for part, share in report["all_zero"].items()}
    published = " (in the paper: 57% and 38%)" if config.data.name == "chestxray14" else ""
    console.print(f"images without any class: {without['train']} of train, {without['test']} of test{published}")
    console.print(f"facts and pictures: {folder}", highlight=False, markup=False, soft_wrap=True)


def show_methods(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print the table of methods, or one method's options."""
    from fednca.methods import find_method
    from fednca.methods.registry import option_fields
    from fednca.report.tables import methods_table, options_table

    if arguments.name:
        found = find_method(arguments.name)
        options = option_fields(found, found.parts)
        console.print(options_table(f"{arguments.name}: {found.about.summary}", "method", options))
    else:
        console.print(methods_table(arguments.classes))


def show_datasets(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print the table of datasets, or one dataset's options."""
    from fednca.data.sources import get_source, source_names
    from fednca.report.tables import datasets_table, options_table

    if arguments.name:
        found = get_source(arguments.name)
        console.print(options_table(f"{arguments.name}: {found.SUMMARY}", "data", found.Options.model_fields))
    else:
        sources = {name: get_source(name) for name in source_names()}
        console.print(datasets_table(sources, Path(arguments.root or "data")))


def run_report(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Write the report page."""
    from fednca.report.groups import find_runs
    from fednca.report.page import watch_page, write_page

    runs, out = find_runs(arguments.runs), place(arguments, "report.html")
    if arguments.watch:
        console.print(
            f"writing {out} every 30 seconds; you can open it now", highlight=False, markup=False, soft_wrap=True
        )
        watch_page(runs, out)
    else:
        write_page(runs, out, pictures=not arguments.no_pictures)
    console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)


def run_figures(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Draw the figures."""
    from fednca.report.groups import find_runs
    from fednca.report.pictures import draw_pictures

    folder = place(arguments, "figures")
    paths = draw_pictures(find_runs(arguments.runs), folder, images=arguments.images)
    console.print(f"{len(paths)} files: {folder}", highlight=False, markup=False, soft_wrap=True)


def place(arguments: Namespace, name: str) -> Path:
    """Return where to write: --out, else the run's folder, or the current one for several runs."""
    if arguments.out:
        return Path(arguments.out)
    return Path(arguments.runs[0]) / name if len(arguments.runs) == 1 else Path(name)
