"""Methods by name: a file of this package, an entry point `fednca.methods`, or `package.module:Name`."""

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.plugins import find_plugin, plugin_names
from fednca.config import validate

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from fednca.config import Config, MethodConfig
    from fednca.methods.contract import Method

NOT_METHODS = {"contract", "registry"}
NONE = "none"  # in place of a closing's name: no closing


def method_names() -> list[str]:
    """Return the names of all methods without importing them."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    own = [module.name.replace("_", "-") for module in modules if module.name not in NOT_METHODS]
    return sorted({*own, *plugin_names("methods")})


def find_method(name: str) -> "Method":
    """Return a method with its defaults."""
    from fednca.methods.contract import Method

    found = find_plugin("methods", name)
    if found is None:
        if name not in method_names():
            raise unknown_name("method", name, method_names())
        found = importlib.import_module(f"fednca.methods.{name.replace('-', '_')}").METHOD
    if not isinstance(found, Method):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise FedncaError(f"'{name}' is a {kind}; name a fednca.methods.Method")
    return found


def combine(chosen: "MethodConfig") -> "Method":
    """Return the method with the chosen learner and closing in place of its own, all with their defaults."""
    method = find_method(chosen.name)
    learner, closing = method.learner, method.closing
    if chosen.learner is not None:
        learner = find_method(chosen.learner).learner
        if type(method.rule) is type(find_method("fedavg").rule) and closing is None and chosen.name != "fedavg":
            raise FedncaError(
                f"method '{chosen.name}' differs from fedavg only in what a client learns, which --learner replaces; "
                "use fedavg (and --criterion for another loss)"
            )
    if chosen.closing == NONE:
        closing = None
    elif chosen.closing is not None:
        closing = find_method(chosen.closing).closing
        if closing is None:
            closings = [name for name in method_names() if find_method(name).closing is not None]
            raise FedncaError(f"method '{chosen.closing}' has no closing (known: {', '.join([*closings, NONE])})")
    if closing is not None and not isinstance(learner, closing.needs):
        fitting = [name for name in method_names() if isinstance(find_method(name).learner, closing.needs)]
        raise FedncaError(
            f"the closing of '{chosen.closing or chosen.name}' does not work with the learner of "
            f"'{chosen.learner or chosen.name}'; use --learner {' or '.join(fitting)}, or --closing none"
        )
    return replace(method, learner=learner, closing=closing)


def option_owners(chosen: "MethodConfig") -> dict[str, list[str]]:
    """Return which parts the config's `options`, `learner_options` and `closing_options` belong to.

    The method's own parts share `options`; a learner or closing of another method has a place of its own.
    """
    other = {"learner": chosen.learner, "closing": chosen.closing}
    places = {"options": [part for part in ("learner", "rule", "closing") if other.get(part) is None]}
    return places | {f"{part}_options": [part] for part, name in other.items() if name not in {None, NONE}}


def create_method(config: "Config") -> "Method":
    """Return the configured method: its parts with the config's options, and every open option set."""
    from fednca.methods.contract import options_of

    chosen = config.method
    method = combine(chosen)
    built: dict[str, Any] = {}
    for place, parts in option_owners(chosen).items():
        values, known = getattr(chosen, place), option_fields(method, parts)
        for name in values:
            if name not in known:
                raise unknown_name("setting", f"method.{place}.{name}", [f"method.{place}.{each}" for each in known])
        for part, default in method.parts.items():
            if part in parts:
                own = default.model_dump(mode="json", exclude_defaults=True)
                own |= {name: values[name] for name in options_of(default) if name in values}
                built[part] = validate(type(default), own, f"method.{place}")
    for place in ("learner_options", "closing_options"):
        if getattr(chosen, place) and place not in option_owners(chosen):
            part = place.partition("_")[0]
            raise FedncaError(f"method.{place} has options, but no other {part} is chosen to read them; add --{part}")
    learner = built["learner"]
    if chosen.criterion is not None:
        if learner.own_loss or learner.criterion is not None:
            raise FedncaError(
                f"'{chosen.learner or chosen.name}' has a loss of its own in place of BCE; leave method.criterion out"
            )
        learner = learner.model_copy(update={"criterion": chosen.criterion})
    built["learner"] = learner.decided(config.model.pretrained != "none")
    return replace(method, **built)


def option_fields(method: "Method", parts: Iterable[str]) -> dict[str, "FieldInfo"]:
    """Return the options of some of a method's parts, by name."""
    from fednca.methods.contract import options_of

    own = [method.parts[part] for part in parts if part in method.parts]
    return {name: type(part).model_fields[name] for part in own for name in options_of(part)}
