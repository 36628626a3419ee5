"""The table of methods and docs/methods.md, both made from the methods' own descriptions.

`python -m fednca.report.methods` prints the page.
"""

import sys
from dataclasses import dataclass

import torch

from fednca.config.fields import describe_option
from fednca.methods import find_method, method_names
from fednca.methods.contract import About, Method
from fednca.methods.registry import option_fields
from fednca.models import Classifier, build_backbone

INTRODUCTION = """\
# Methods

`--method NAME` chooses one of these methods. State is what client or server keep from round to round. The upload is
what one client sends per round with a ResNet-18 and {classes} classes. [Words and symbols](#words-and-symbols) are
explained below the table.
"""

WORDS = """
A method has up to three parts, and a learner or closing may come from another method:

| part | what it says | taken from another method | its options |
|---|---|---|---|
| learner | what a client trains: head and local objective | `--learner fednca-ml` | `--learner.tau 0.5` |
| rule | what is kept (the state), corrected and aggregated | | `--method.mu 0.1` |
| closing | what completes a model before it is judged | `--closing spherefed` or `none` | `--closing.ridge 0.1` |

So `--method scaffold --learner fednca-ml --learner.tau 0.5` trains FedNCA-ML's learner by SCAFFOLD's rule.
`--method.OPTION` sets an option of a part that the method itself brings; an option that no part has is refused.
Only `spherefed` has a closing, which needs its learner. Training goes on from the weights before the closing.
`--criterion balanced` or `asl` replaces a learner's BCE; fedavg-balanced, fedavg-asl and spherefed keep their own loss.
A method of your own is one file: [CONTRIBUTING](../CONTRIBUTING.md#add-a-part-in-one-file).

## Words and symbols

- *BCE*: binary cross-entropy, in which each class is a yes-or-no question of its own. *MSE*: mean squared error.
- *Positive, negative*: a class that an image shows, and one that it does not.
- *Class vector*: the vector that a feature is compared with to score a class.
- *ETF*: simplex equiangular tight frame, fixed class vectors that are as far apart as possible.
- *LADM*: label-aware disentanglement, attention that reads one feature per class from the feature map.
- *Pooled feature*: the average over the feature map, one feature for all classes.
- *Fisher information*: for each weight, the mean over images of the squared gradient of an image's loss.
- `F`, `f`, `h_c`: the feature map, the pooled feature, and the feature of class c. `m_c`: the vector of class c.
- `y`, `|Y|`: an image's labels (1 for positive, 0 for negative), and how many are positive.
- `p = σ(a)`, `ŷ`: the probability of a class, from its logit `a` by the sigmoid `σ`.
- `w`, `w_k`: the global weights, and those of client k after its local training; in local formulas, its weights so far.
- `K`: the number of clients. With `--weighting samples`, the average counts them by their images instead.
- `g`, `lr`: a client's gradient and its learning rate. `Δ`: the average change of the clients' weights in a round.

This page is made by `python -m fednca.report.methods`; do not edit it."""


@dataclass(frozen=True)
class Row:
    """One method in the table."""

    name: str
    summary: str
    about: About
    upload: int  # bytes per client and round
    method: Method


def method_rows(classes: int) -> list[Row]:
    """Describe every method; the uploads are for a ResNet-18."""
    found = {name: find_method(name) for name in method_names()}
    return [Row(name, each.about.summary, each.about, upload(each, classes), each) for name, each in found.items()]


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
        options = [(part, *own) for part in row.method.parts for own in option_fields(row.method, [part]).items()]
        if options:
            lines += ["| option | part | default | what it does |", "|---|---|---|---|"]
        for part, name, field in options:
            default = "" if field.default is None else f"`{field.default}`"
            what = describe_option(field).replace("|", "\\|")  # a bare "|" would end the cell
            lines.append(f"| `{name}` | {part} | {default} | {what} |")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
