"""The rows of a bench: methods with their options, as text, as settings and as folder names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from fednca.base.errors import FedncaError
from fednca.config import MethodConfig
from fednca.config.fields import parse_options, parse_value
from fednca.methods import method_names
from fednca.methods.registry import combine, option_fields, option_owners

ALSO_IN_ALL = {"fednca-ml": ["fednca-ml:variant=released"]}  # beside the methods with their defaults
PLACES = {"": "options", "learner.": "learner_options", "closing.": "closing_options"}  # of options, by their prefix
MARKS = {"learner.": "@", "closing.": "+"}  # before the name of a part
CRITERION = "criterion"
NAME = r"[\w.]+:[A-Za-z_]\w*(?=[@+:]|$)|[\w-]+"  # package.module:Name, or a plain name
ROW = rf"(?P<name>{NAME})(@(?P<learner>{NAME}))?(\+(?P<closing>{NAME}))?(:(?P<options>.*))?"
MOST_SEEDS = 1000  # more were hardly meant


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
    """Read `NAME[@LEARNER][+CLOSING][:option=value[,option=value…]]`.

    An option of the learner or the closing is written `learner.option` or `closing.option`; `criterion=…` replaces the
    BCE of the learner.
    """
    match = re.fullmatch(ROW, text)
    if match is None:
        raise FedncaError(
            f"'{text}' is not NAME[@LEARNER][+CLOSING][:option=value,...]; separate methods with options by spaces"
        )
    name, learner, closing, options = (match[each] or "" for each in ("name", "learner", "closing", "options"))
    method_name, _, option = name.partition(":")
    if option and method_name in method_names():
        raise FedncaError(f"'{option}' in '{text}' is not option=value; methods have spaces between them")
    chosen = MethodConfig(name=name, learner=learner or None, closing=closing or None)
    method, owners = combine(chosen), option_owners(chosen)
    given = split_options(text, options)
    overrides: dict[str, Any] = {
        "method.name": name,
        "method.learner": chosen.learner,
        "method.closing": chosen.closing,
    }
    criterion = given[""].pop(CRITERION, None)
    shown = []
    for prefix, place in PLACES.items():
        if given[prefix] and place not in owners:
            part, option = prefix.rstrip("."), next(iter(given[prefix]))
            way_out = f"{name}{MARKS[prefix]}{part.upper()}"
            raise FedncaError(
                f"'{prefix}{option}' in '{text}' is an option of a {part}, but the row has none; write {way_out}"
            )
        fields = option_fields(method, owners.get(place, []))
        for option in given[prefix]:
            others = [each for each in PLACES if option in option_fields(method, owners.get(PLACES[each], []))]
            if option not in fields and others:
                raise FedncaError(f"'{prefix}{option}' in '{text}' is not known; did you mean '{others[0]}{option}'?")
        found = parse_options(
            name if not prefix else learner if "learner" in prefix else closing, fields, given[prefix]
        )
        overrides[f"method.{place}"] = values = {option: found[option] for option in fields if option in found}
        shown += [f"{prefix}{option}={show(value)}" for option, value in values.items()]
    if criterion is not None:
        path = f"method.{CRITERION}"
        overrides[path] = parse_value(path, MethodConfig.model_fields[CRITERION], criterion)
        shown.insert(0, f"{CRITERION}={show(overrides[path])}")
    (named, *_) = name_and_options(text)
    return Row(":".join(filter(None, [named, ",".join(shown)])), overrides)


def name_and_options(text: str) -> list[str]:
    """Return a row's method with its parts, followed by each of its options.

    >>> name_and_options("my.package:M@fednca-ml:mu=1,learner.tau=0.5")
    ['my.package:M@fednca-ml', 'mu=1', 'learner.tau=0.5']
    """
    match = re.fullmatch(ROW, text)
    if match is None or match["options"] is None:
        return [text]
    return [text[: match.start("options") - 1], *match["options"].split(",")]


def split_options(text: str, options: str) -> dict[str, dict[str, str]]:
    """Return the texts of a row's options, by the prefix of their place and by their name."""
    given: dict[str, dict[str, str]] = {prefix: {} for prefix in PLACES}
    for pair in options.split(",") if options else []:
        option, equals, value = pair.partition("=")
        if not equals:
            raise FedncaError(f"'{pair}' in '{text}' is not option=value; methods have spaces between them")
        prefix = next((each for each in PLACES if each and option.startswith(each)), "")
        option = option.removeprefix(prefix).replace("-", "_")
        if option in given[prefix]:
            raise FedncaError(f"'{prefix}{option}' stands twice in '{text}'; give it one value")
        given[prefix][option] = value
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
