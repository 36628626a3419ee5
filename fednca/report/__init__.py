"""Tables, figures and pages about runs; nothing here trains."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.report.comparison import Entry, Line, compare, to_csv, to_latex, to_markdown
    from fednca.report.figures import draw_partition
    from fednca.report.groups import Group, find_runs, group_runs
    from fednca.report.page import watch_page, write_page
    from fednca.report.partition import write_report
    from fednca.report.pictures import draw_pictures
else:
    __getattr__, __dir__ = lazy(__name__, "groups", "comparison", "partition", "page", "figures", "pictures")

__all__ = [
    "Entry", "Group", "Line", "compare", "draw_partition", "draw_pictures", "find_runs", "group_runs", "to_csv",
    "to_latex", "to_markdown", "watch_page", "write_page", "write_report",
]  # fmt: skip
