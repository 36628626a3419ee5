"""Command-line flags, made from the config tree so that each option is declared only once."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic.fields import FieldInfo

from fednca.base.errors import FedncaError, unknown_name
from fednca.config import Config, leaves, load_config, preset_names
from fednca.config.fields import choices, parse_options, parse_value, value_type

if TYPE_CHECKING:
    from fednca.config.options import Options

NAMES = {"data.name": "dataset", "method.name": "method"}  # flags whose short name differs from their field's


class Parser(argparse.ArgumentParser):
    """An argument parser that raises an error of one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting."""
        raise FedncaError(f"{message}; see `{self.prog} --help`")


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a preset or TOML file to start from."""
    parser.add_argument("preset", metavar="PRESET", help=f"a preset ({', '.join(preset_names())}) or a TOML file")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field, and explain how to set the options of method, learner and dataset."""
    parser.usage = f"{parser.prog} {'' if parser.get_default('preset') else 'PRESET '}[--FLAG VALUE ...]"
    parser.epilog = (
        "Set the options of the method, the learner, the closing and the dataset with --method.NAME, --learner.NAME, "
        "--closing.NAME and --data.NAME; `fednca methods NAME` and `fednca datasets NAME` list them."
    )
    add_fields(parser, sorted(leaves(), key=lambda leaf: "." in leaf[0]))


def add_fields(parser: argparse.ArgumentParser, fields: Iterable[tuple[str, FieldInfo]]) -> None:
    """Add a flag for each field: `--train.rounds`, and also `--rounds` if no earlier field took that name."""
    groups: dict[str, Any] = {}
    taken = {"name"}
    for path, field in fields:
        section, _, name = path.rpartition(".")
        if section not in groups:
            groups[section] = parser.add_argument_group(section or "run", section_class(section).__doc__)
        short = NAMES.get(path, name)
        flags = [f"--{path}"] if short in taken else [f"--{short}", f"--{path}"]
        taken.add(short)
        default = "" if field.default is None else f" (default: {field.default})"
        groups[section].add_argument(
            *dict.fromkeys(with_dashes(flag) for flag in flags),
            dest=path,
            metavar=placeholder(field),
            default=argparse.SUPPRESS,
            help=f"{field.description}{default}".replace("%", "%%"),
        )


def not_empty(text: str) -> str:
    """Refuse an empty text."""
    if not text:
        raise argparse.ArgumentTypeError("give a value that is not empty")
    return text


def whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Return a reader of whole numbers within these bounds."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
            upper = "or more" if high == math.inf else f"to {high}"
            raise argparse.ArgumentTypeError(f"give a whole number ({low} {upper}), not '{text}'")
        return int(text)

    return read


def section_class(section: str) -> "type[Options]":
    """Return the class of a config section, named by its dotted path."""
    found: type[Options] = Config
    for name in filter(None, section.split(".")):
        found = found.model_fields[name].annotation  # type: ignore[assignment]
    return found


def placeholder(field: FieldInfo) -> str:
    """Return what the help shows for a flag's value: its choices, or its type."""
    kinds = {int: "N", float: "X", str: "TEXT", bool: "true|false"}
    return "|".join(choices(field)) or kinds.get(value_type(field), "X,Y")


def with_dashes(word: str) -> str:
    """Accept `--batch_size` for `--batch-size`; leave values as they are."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def collect_overrides(preset: str, arguments: argparse.Namespace, rest: list[str], known: list[str]) -> dict[str, Any]:
    """Return what the flags set, by dotted path; `rest` holds flags for the options of method and dataset."""
    fields = dict(leaves())
    found = {path: parse_value(path, fields[path], text) for path, text in vars(arguments).items() if path in fields}
    config = load_config(preset, found)
    texts: dict[str, dict[str, str]] = {}
    own_flags = option_flags(config)
    for flag, value in pair_up(rest, known + own_flags):
        kind, _, name = flag.removeprefix("--").partition(".")
        texts.setdefault(kind, {})[name.replace("-", "_")] = value
    for kind, given in texts.items():
        owner, options, path, before = option_owner(kind, config)
        for name in given:
            parts = [flag for flag in own_flags if flag.endswith(with_dashes(f"--.{name}").removeprefix("--"))]
            if name not in options and parts:
                raise FedncaError(f"option of {owner} '{name}' is not known; did you mean '{parts[0]}'?")
        found[path] = before | parse_options(owner, options, given)
    return found


def option_flags(config: Config) -> list[str]:
    """Return the flags of the options that the chosen method, learner and dataset have."""
    from fednca.methods.registry import option_owners

    places = option_owners(config.method)
    kinds = ["method", "data", *(part for part in ("learner", "closing") if f"{part}_options" in places)]
    return [with_dashes(f"--{kind}.{name}") for kind in kinds for name in option_owner(kind, config)[1]]


def option_owner(kind: str, config: Config) -> tuple[str, dict[str, FieldInfo], str, dict[str, Any]]:
    """Return whose options `--kind.NAME` sets: its name, the options, where they stand in the config, and so far."""
    if kind == "data":
        from fednca.data.sources import get_source

        fields = get_source(config.data.name).Options.model_fields
        return config.data.name, fields, "data.options", config.data.options
    from fednca.methods.registry import find_method, option_fields, option_owners

    chosen, place = config.method, "options" if kind == "method" else f"{kind}_options"
    owners = option_owners(chosen)
    if place not in owners:
        raise FedncaError(
            f"--{kind}.NAME sets an option of the {kind}, but no --{kind} is given; the method's own are --method.NAME"
        )
    name = chosen.name if kind == "method" else getattr(chosen, kind)
    return name, option_fields(find_method(name), owners[place]), f"method.{place}", getattr(chosen, place)


def pair_up(words: list[str], known: list[str]) -> Iterator[tuple[str, str]]:
    """Read `--flag value` and `--flag=value`."""
    queue = iter(words)
    for word in queue:
        flag, equals, value = word.partition("=")
        if not word.startswith("--"):
            raise FedncaError(f"unexpected argument '{word}'; settings are given as --FLAG VALUE")
        if not flag.startswith(("--method.", "--learner.", "--closing.", "--data.")):
            dotted = [each for each in known if each.endswith(f".{flag.removeprefix('--')}")]
            if dotted:
                raise FedncaError(f"flag '{flag}' is not known; did you mean '{dotted[0]}'?")
            raise unknown_name("flag", flag, known)
        following = value if equals else next(queue, None)
        if following is None:
            raise FedncaError(f"flag '{flag}' needs a value")
        yield flag, following
