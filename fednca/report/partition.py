"""Facts about a partition as JSON: who holds what, what was left out, and how much the clients differ."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednca.base.files import explain_write, write_atomic
from fednca.data.facts import partition_report
from fednca.data.federation import Federation


def write_report(federation: Federation, folder: Path, settings: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Write `partition.json` and the pictures into a folder; return the facts."""
    from fednca.report.figures import draw_partition

    report = partition_report(federation, settings)
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    draw_partition(federation, folder)
    content = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "partition.json", content.encode())
    return report
