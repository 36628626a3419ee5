"""The table of methods and docs/methods.md, both made from the methods' own descriptions.

`python -m fednca.report.methods` prints the page.
"""

import sys
from pathlib import Path

import torch

from fednca.config.fields import describe_option
from fednca.methods import find_method, method_names
from fednca.methods.contract import Method
from fednca.methods.registry import option_fields
from fednca.models import Classifier, build_backbone

TEMPLATE = Path(__file__).parent / "assets/methods.md"


def upload(method: Method, classes: int) -> int:
    """Count the bytes a client sends per round: weights, buffers and the rule's extra copies of the weights."""
    if method.rule.centralized:
        return 0
    with torch.device("meta"):
        backbone = build_backbone("resnet18")
        model = Classifier(backbone, method.learner.sketch().build_head(tuple(map(str, range(classes))), backbone.dim))
    sent = sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return int(sent + method.rule.copies * trained)


def megabytes(number: int) -> str:
    """Return a number of bytes as megabytes, in words.

    >>> megabytes(44_800_000)
    '44.8 MB'
    """
    return f"{number / 1e6:.1f} MB"


def page(classes: int = 20) -> str:
    """Return the text of docs/methods.md."""
    found = {name: find_method(name) for name in method_names()}
    table = [
        "| method | from | head | local objective | state | aggregation | upload |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, method in found.items():
        about, size = method.about, megabytes(upload(method, classes))
        cells = (f"`{name}`", about.paper, about.head, about.objective, about.state, about.aggregation, size)
        table.append(f"| {' | '.join(cells)} |")
    template = TEMPLATE.read_text(encoding="utf-8")
    lines = [template.format(classes=classes, table="\n".join(table)).rstrip()]
    for name, method in found.items():
        lines += ["", f"## {name}", "", method.about.summary, "", f"    {method.about.formula}", ""]
        options = [(part, *own) for part in method.parts for own in option_fields(method, [part]).items()]
        if options:
            lines += ["| option | part | default | what it does |", "|---|---|---|---|"]
        for part, option, field in options:
            default = "" if field.default is None else f"`{field.default}`"
            what = describe_option(field).replace("|", "\\|")  # a bare "|" would end the cell
            lines.append(f"| `{option}` | {part} | {default} | {what} |")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
