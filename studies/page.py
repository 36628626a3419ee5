"""Write docs/results.md and its figures from the records.

python studies/page.py [--records FOLDER] [--out docs] [--check]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ablations import candidates, components, extras, queries
from by_class import which_classes
from comparisons import against_fedavg, main_tables, other_data, several_draws
from facts import appendix, how_it_was_run, trials, which_draw
from features import feature_section
from figures import draw_all, picture_of
from gains import when_it_helps
from grid import same_images
from matplotlib.figure import Figure
from pace import sooner_or_better
from plan import SETTINGS, TABLE, VOC, Records
from records import RECORDS, read_records
from rejection import can_it_be_met
from seed_tables import NOT_RUN, notes_below
from study import Study
from summary import in_short
from swings import do_runs_settle

from fednca.base.errors import FedncaError
from fednca.base.files import explain_write, write_atomic

NOTES = Path(__file__).parent / "notes.md"
OUT = Path(__file__).parents[1] / "docs"
PAGE = "results.md"
FOLDER = "results"  # of the figures, beside the page


@dataclass(frozen=True)
class Page:
    """The text of the page, and its figures by name."""

    text: str
    figures: dict[str, Figure]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or with --check say whether it is up to date."""
    parser = argparse.ArgumentParser(description="Write docs/results.md and its figures from the records.")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results.md and results/")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    given = parser.parse_args(arguments)
    try:
        page = make_page(records_of(given.records))
        if not given.check:
            write_page(page, given.out)
        elif complaint := what_differs(page, given.out):
            sys.exit(complaint)
    except FedncaError as error:
        parser.error(str(error))


def records_of(folder: Path) -> Records:
    """Read the records that the page shows; the study's own folder need not be there before its first run."""
    if folder != RECORDS and not folder.is_dir():
        raise FedncaError(f"there is no folder of records at '{folder}'")
    return {path: record for path, record in read_records(folder).items() if record["setting"] not in VOC}


def make_page(records: Records) -> Page:
    """Compose the page from records, which are given by path."""
    study = Study(records)
    figures = draw_all(study)
    links = {name: f"![{name}]({FOLDER}/{name}.svg)" for name in figures}
    sections = [
        in_short(study),
        NOTES.read_text(encoding="utf-8").strip(),
        main_tables(study),
        learning_curves(study, links),
        do_runs_settle(study),
        sooner_or_better(study),
        against_fedavg(study),
        several_draws(study),
        when_it_helps(study, links.get("gains")),
        which_classes(study),
        same_images(study, links.get("gains-digits")),
        components(study),
        can_it_be_met(study),
        queries(study),
        extras(study),
        candidates(study),
        other_data(study),
        feature_section(study, links),
        which_draw(study),
        trials(study),
        how_it_was_run(study),
        appendix(study),
    ]
    return Page("\n\n".join(filter(None, sections)) + "\n", figures)


def learning_curves(study: Study, links: dict[str, str]) -> str:
    """Show the curves of each setting."""
    text = """\
## Learning curves

The mean over seeds on the draw taken; bands reach from the lowest to the highest seed."""
    shown = {setting: links.get(f"curves-{setting}", f"{setting}: {NOT_RUN}") for setting in SETTINGS}
    return "\n\n".join([text, *shown.values()]) + notes_below(study, SETTINGS, TABLE)


def write_page(page: Page, out: Path) -> None:
    """Write text and figures, and delete figures that the page no longer shows."""
    folder = out / FOLDER
    with explain_write(out):
        (folder if page.figures else out).mkdir(parents=True, exist_ok=True)
    for name, figure in page.figures.items():
        write_atomic(folder / f"{name}.svg", picture_of(figure))
    for path in stale(page, out):
        path.unlink()
    write_atomic(out / PAGE, page.text.encode())


def stale(page: Page, out: Path) -> list[Path]:
    """Return the figures on disk that the page does not show."""
    return [path for path in sorted((out / FOLDER).glob("*.svg")) if path.stem not in page.figures]


def what_differs(page: Page, out: Path) -> str:
    """Say in one sentence how the page on disk differs from the records; empty if it does not."""
    path = out / PAGE
    again = "run `python studies/page.py`"
    if not path.is_file() or path.read_text(encoding="utf-8") != page.text:
        return f"'{path}' does not match the records; {again}"
    paths = {name: out / FOLDER / f"{name}.svg" for name in page.figures}
    same = all(paths[name].is_file() and paths[name].read_bytes() == picture_of(page.figures[name]) for name in paths)
    if not same or stale(page, out):
        return f"the figures in '{out / FOLDER}' do not match the records; {again}"
    return ""


if __name__ == "__main__":
    main()
