"""The commands that show runs: `report` and `figures`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.flags import whole

if TYPE_CHECKING:
    from rich.console import Console

Add = Callable[[str, Callable[..., None], str], ArgumentParser]


def add_commands(add: Add) -> None:
    """Add the commands and their flags; `add` makes a command of a name, a function and a sentence."""
    report = add("report", run_report, "Write a page that shows runs side by side; it needs no network.")
    figures = add("figures", run_figures, "Draw what trained models make of test images, side by side: PNG and SVG.")
    for sub in (report, figures):
        sub.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds several")
    report.add_argument("-o", "--out", metavar="FILE", help="page to write (default: RUN/report.html)")
    report.add_argument("--no-pictures", action="store_true", help="leave out features and evidence on test images")
    report.add_argument("--watch", action="store_true", help="write it again every 30 s until all runs are finished")
    figures.add_argument("-o", "--out", metavar="DIR", help="folder to write to (default: RUN/figures)")
    figures.add_argument(
        "--images",
        metavar="N",
        type=whole(1),
        default=2000,
        help="most test images to take features of (default: 2000)",
    )


def run_report(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Write the page."""
    from fednca.report.groups import find_runs
    from fednca.report.page import watch_page, write_page

    runs, out = find_runs(arguments.runs), place(arguments, "report.html")
    if arguments.watch:
        console.print(f"writing {out} every 30 seconds; open it now", highlight=False, markup=False, soft_wrap=True)
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
    """Return where to write: as told, else beside the run, or here where there are several."""
    if arguments.out:
        return Path(arguments.out)
    return Path(arguments.runs[0]) / name if len(arguments.runs) == 1 else Path(name)
