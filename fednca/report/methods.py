"""The table of methods and docs/methods.md, both made from the methods' own descriptions.

`python -m fednca.report.methods` prints the page.
"""

import sys
from dataclasses import dataclass

import torch

from fednca.flags import describe_option
from fednca.methods import method_class, method_names
from fednca.methods.base import About, Method, Task
from fednca.models import Classifier, build_backbone

INTRODUCTION = """\
# Methods

`--method NAME` chooses one of these methods. The upload is what one client sends per round with a ResNet-18 and
{classes} classes.
"""

WORDS = """
A method has two parts. The *learner* is what a client trains: the head and the local objective. The *rule* is how the
federation trains it: penalties, corrections, what clients and server keep (the state), and how updates are aggregated.

- `--method.OPTION VALUE` sets an option of the method: `--method fedprox --method.mu 0.1`.
- `--learner NAME` trains another method's learner under a method's rule: `--method scaffold --learner fednca-ml`.
- `--learner.OPTION VALUE` sets an option of that learner: `--learner.tau 0.5`.
- `--criterion balanced` or `--criterion asl` replaces the BCE of any learner that has one.

The words and symbols on this page:

- *BCE*: binary cross-entropy, in which each class is a yes-or-no question of its own.
- *Positive, negative*: a class that an image shows, and one that it does not.
- *Class vector*: the vector that a feature is compared with to score a class.
- *ETF*: simplex equiangular tight frame, fixed class vectors that are as far apart as possible.
- *LADM*: label-aware disentanglement, attention that reads one feature per class from the feature map.
- *Pooled feature*: the average over the feature map, one feature for all classes.
- `w` and `w_k`: the global weights, and those of client k after its local training.
- `K`: the number of clients. With `--weighting samples`, the average counts them by their images instead.
- `p = σ(a)`: the probability of a class, from its logit `a` by the sigmoid `σ`.

This page is made by `python -m fednca.report.methods`; do not edit it."""


@dataclass(frozen=True)
class Row:
    """One method in the table."""

    name: str
    summary: str
    about: About
    upload: int  # bytes per client and round
    method: type[Method]


def method_rows(classes: int) -> list[Row]:
    """Describe every method; the uploads are for a ResNet-18."""
    found = {name: method_class(name) for name in method_names()}
    return [Row(name, (c.__doc__ or "").splitlines()[0], c.about, upload(c, classes), c) for name, c in found.items()]


def upload(method: type[Method], classes: int) -> int:
    """Count the bytes a client sends per round: weights, buffers and the method's extra copies of the weights."""
    if method.centralized:
        return 0
    with torch.device("meta"):
        backbone = build_backbone("resnet18")
        model = Classifier(backbone, method.sketch().head(Task(tuple(map(str, range(classes))), backbone.dim)))
    sent = sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return int(sent + method.extra_copies * trained)


def megabytes(number: int) -> str:
    """Return a number of bytes as megabytes, in words.

    >>> megabytes(44_800_000)
    '44.8 MB'
    """
    return f"{number / 1e6:.1f} MB"


def page(classes: int = 20) -> str:
    """Return the text of docs/methods.md."""
    rows = method_rows(classes)
    lines = [INTRODUCTION.format(classes=classes)]
    lines += [
        "| method | from | head | local objective | state | aggregation | upload |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        about = row.about
        cells = (f"`{row.name}`", about.paper, about.head, about.objective, about.state, about.aggregation)
        lines.append(f"| {' | '.join(cells)} | {megabytes(row.upload)} |")
    lines.append(WORDS)
    for row in rows:
        lines += ["", f"## {row.name}", "", row.summary, "", f"    {row.about.formula}", ""]
        options = row.method.Hyper.model_fields
        if options:
            lines += ["| option | default | what it does |", "|---|---|---|"]
        for name, field in options.items():
            default = "" if field.default is None else f"`{field.default}`"
            what = describe_option(field).replace("|", "\\|")  # a bare "|" would end the cell
            lines.append(f"| `{name}` | {default} | {what} |")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
