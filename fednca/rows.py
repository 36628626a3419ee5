"""The rows of a bench: methods with their options, as text, as settings and as folder names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from fednca.config import MethodConfig, parse_value
from fednca.errors import FedncaError
from fednca.flags import parse_options
from fednca.methods import method_class, method_names

ALSO_IN_ALL = {"fednca-ml": ["fednca-ml:variant=released"]}  # in addition to every method with its defaults
LEARNER = "learner."  # prefix of the learner's options
CRITERION = "criterion"
MOST_SEEDS = 1000  # a larger number is taken for a seed given by mistake


@dataclass(frozen=True)
class Row:
    """A method with its options: its text, and the settings it stands for."""

    text: str
    overrides: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The name of the row's folder.

        >>> parse_row("fednca-ml:variant=released,tau=0.5").folder
        'fednca-ml_variant-released_tau-0.5'
        """
        name = self.text.translate(str.maketrans(":,=", "__-"))
        safe = re.sub(r"[^\w.@+-]", "-", name, flags=re.ASCII)
        return safe if safe == name else f"{safe}-{blake2b(name.encode(), digest_size=4).hexdigest()}"


def parse_rows(words: Sequence[str]) -> list[Row]:
    """Read methods in their order, without repeats; `all` means every method with its defaults."""
    texts: list[str] = []
    for word in words:
        for text in [word] if ":" in word else word.split(","):
            texts += all_rows() if text == "all" else [text]
    rows = {row.text: row for row in map(parse_row, texts)}
    if len({row.folder for row in rows.values()}) < len(rows):
        raise FedncaError("two of the methods would share a folder; put them into separate benches")
    return list(rows.values())


def all_rows() -> list[str]:
    """Return the rows that `all` stands for."""
    return [text for name in method_names() for text in [name, *ALSO_IN_ALL.get(name, [])]]


def parse_row(text: str) -> Row:
    """Read `NAME[@LEARNER][:option=value[,option=value…]]`; options of the learner are written `learner.option`.

    Every method takes `criterion=…`, which replaces the BCE of its learner.
    """
    methods, _, options = text.partition(":")
    if "," in methods:
        raise FedncaError(f"'{text}' has a comma before its options; separate methods with options by spaces")
    name, at, learner = methods.partition("@")
    owners = {"": name} | ({LEARNER: learner} if at else {})
    given = split_options(text, options, owners)
    criterion = given[""].pop(CRITERION, None)
    values: dict[str, dict[str, Any]] = {LEARNER: {}}
    for prefix, owner in owners.items():
        hyper = method_class(owner).Hyper
        found = parse_options(owner, hyper, given[prefix])
        values[prefix] = {option: found[option] for option in hyper.model_fields if option in found}
    shown = [f"{prefix}{option}={show(value)}" for prefix in owners for option, value in values[prefix].items()]
    overrides: dict[str, Any] = {
        "method.name": name,
        "method.learner": learner or None,
        "method.options": values[""],
        "method.learner_options": values[LEARNER],
    }
    if criterion is not None:
        path = f"method.{CRITERION}"
        overrides[path] = parse_value(path, MethodConfig.model_fields[CRITERION], criterion)
        shown.insert(0, f"{CRITERION}={show(overrides[path])}")
    return Row(":".join(filter(None, [methods, ",".join(shown)])), overrides)


def split_options(text: str, options: str, owners: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a row's options as texts, by the prefix of their owner and by name."""
    given: dict[str, dict[str, str]] = {prefix: {} for prefix in owners}
    for pair in options.split(",") if options else []:
        option, equals, value = pair.partition("=")
        prefix = LEARNER if option.startswith(LEARNER) else ""
        if not equals:
            raise FedncaError(f"'{pair}' in '{text}' is not option=value; separate methods by spaces")
        if prefix not in owners:
            raise FedncaError(
                f"'{option}' in '{text}' is an option of a learner, but the row has none; write {owners['']}@LEARNER"
            )
        given[prefix][option.removeprefix(prefix).replace("-", "_")] = value
    return given


def show(value: object) -> str:
    """Write an option's value in the shortest form that reads back the same.

    >>> [show(value) for value in (1.0, 0.1, True, None, "etf")]
    ['1', '0.1', 'true', 'none', 'etf']
    """
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parse_seeds(text: str) -> list[int]:
    """Read the number of seeds, which then count from 0, or the seeds themselves.

    >>> parse_seeds("3"), parse_seeds("4,7"), parse_seeds("5,")
    ([0, 1, 2], [4, 7], [5])
    """
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*,?", text) or not text.strip("0"):
        raise FedncaError(
            f"--seeds '{text}' is neither a number of seeds, as in '3', nor a list of seeds, as in '4,7' or '5,'"
        )
    numbers = [int(number) for number in text.split(",") if number]
    if "," in text:
        return list(dict.fromkeys(numbers))
    if numbers[0] > MOST_SEEDS:
        raise FedncaError(f"--seeds {text} asks for {text} seeds; for seed {text} alone write '--seeds {text},'")
    return list(range(numbers[0]))
