"""The report of runs as one self-contained HTML file: data, style and drawing code are inside it."""

import base64
import json
import math
import time
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednca.base.errors import FedncaError
from fednca.base.files import explain_write, write_atomic
from fednca.models.overlay import overlay
from fednca.report.facts import Facts, Federations, load_federations, page_facts
from fednca.report.groups import Group, group_runs, setting
from fednca.report.samples import Look, choose_examples, cosines, embed, look, pixels, sample_rows
from fednca.runs import Run

ASSETS = Path(__file__).parent / "assets"
REFRESH = 30  # seconds between versions of the page, which reloads itself as often, while a run is unfinished
IMAGES, POINTS, EXAMPLES, MOST_LOOKED = 500, 300, 4, 6  # small, to be quick; `fednca figures` takes more
SIDE, SMALL = 224, 64  # most pixels in a picture's side; below SMALL the page shows single pixels sharply


def write_page(runs: Sequence[Run], out: Path, *, pictures: bool = True) -> bool:
    """Write the report of runs to a file and return whether all of them are finished.

    pictures: show test images through the finished models, which needs the data and some seconds per method.
    """
    groups = group_runs(runs)
    federations = load_federations(groups)
    facts = page_facts(groups, federations)
    shown, why_not = picture_facts(groups, federations) if pictures else ([], "This page was written without pictures.")
    content = render(facts | {"pictures": shown, "no_pictures": why_not})
    with explain_write(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, content.encode())
    return bool(facts["finished"])


def watch_page(runs: Sequence[Run], out: Path, sleep: Callable[[float], object] = time.sleep) -> None:
    """Rewrite the report until all runs are finished; only the last version has pictures."""
    while not write_page(runs, out, pictures=all(run.finished for run in runs)):
        sleep(REFRESH)


def render(facts: Facts) -> str:
    """Fill the template of the page with the facts."""
    names = dict.fromkeys(group["label"].partition(": ")[0].partition(" (")[0] for group in facts["groups"])
    title = " · ".join(names) if len(names) <= 4 else f"{len(facts['groups'])} methods"
    # An unescaped `<` could end the script element that holds the data.
    data = json.dumps(facts, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(f"fednca report: {title}"),
        "style": _asset("page.css"),
        "script": _asset("charts.js") + _asset("page.js"),
        "data": data,
    }
    before, *pieces = _asset("page.html").split("{{")
    split = (piece.partition("}}") for piece in pieces)
    return before + "".join(parts[name] + rest for name, _, rest in split)


def picture_facts(groups: Sequence[Group], federations: Federations) -> tuple[list[Facts], str]:
    """Show each setting's test images to its finished models; return what they see, and where that failed, why."""
    found, problems = [], []
    for place, (key, federation) in enumerate(federations.items()):
        own = [(i, group) for i, group in enumerate(groups) if setting(group) == key and group.run.finished]
        if isinstance(federation, str):
            problems.append(federation)
            continue
        test = federation.dataset.test
        rows, examples = sample_rows(federation, IMAGES), choose_examples(test.labels, EXAMPLES)
        seen: dict[int, Look] = {}
        for i, group in own[:MOST_LOOKED]:
            try:
                seen[i] = look(group.run, federation, rows, examples)
            except FedncaError as error:
                problems.append(f"{group.label}: {error}")
        if seen:
            found.append({"setting": place} | looks_facts(seen, pixels(test.images, examples), test.labels[examples]))
    if not found and not problems:
        problems.append("No run is finished yet.")
    return found, " ".join(problems)


def looks_facts(seen: dict[int, Look], raw: NDArray[np.uint8], labels: NDArray[np.int8]) -> Facts:
    """Describe what each model sees, by group number; raw: the examples (E, H, W, 3), labels: (E, C)."""
    classes = [np.flatnonzero(row == 1).tolist() for row in labels]
    return {
        "pixels": raw.shape[1] < SMALL,
        "examples": [{"image": as_uri(image), "classes": own} for image, own in zip(raw, classes, strict=True)],
        "looks": [{"group": i, **one_look(found, raw, classes)} for i, found in seen.items()],
    }


def one_look(seen: Look, raw: NDArray[np.uint8], classes: list[list[int]]) -> Facts:
    """Describe what one model sees: its t-SNE map, its cosines and its evidence for each class."""
    plane = embed(seen.pairs, POINTS)
    return {
        "tsne": plane
        and {
            "points": plane.points.round(2).tolist(),
            "classes": plane.classes.tolist(),
            "labels": plane.labels.tolist(),
        },
        "cosine": [[_number(value) for value in row] for row in cosines(seen.means)],
        "evidence": [
            [
                {
                    "image": as_uri(overlay(image, seen.evidence[e, c].astype(np.float32))),
                    "probability": float(seen.probabilities[e, c]),
                }
                for c in own
            ]
            for e, (image, own) in enumerate(zip(raw, classes, strict=True))
        ],
    }


def as_uri(picture: NDArray[np.uint8]) -> str:
    """Return a picture (H, W, 3) as a data URI, shrunk if it is large."""
    image = Image.fromarray(picture)
    image.thumbnail((SIDE, SIDE))
    content = BytesIO()
    kind: dict[str, Any] = {"format": "PNG"} if max(image.size) < SMALL else {"format": "WEBP", "quality": 80}
    image.save(content, **kind)
    return f"data:image/{kind['format'].lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
