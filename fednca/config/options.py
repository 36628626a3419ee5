"""The base of every typed group of settings, and how values are checked against one."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fednca.base.errors import FedncaError, unknown_name


class Options(BaseModel):
    """Immutable, validated settings; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


AnyOptions = TypeVar("AnyOptions", bound=Options)


def validate(model: type[AnyOptions], values: Mapping[str, Any], where: str = "") -> AnyOptions:
    """Check values against an Options class, as strictly typed as TOML; report a mistake in one sentence."""
    try:
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "json_invalid":
            raise FedncaError(f"{where or 'a setting'} has text that is not UTF-8; rename the file or folder") from None
        path = ".".join([where, *map(str, problem["loc"])]).strip(".")
        if problem["type"] == "extra_forbidden":
            known: type[Options] = model
            for part in problem["loc"][:-1]:
                known = known.model_fields[str(part)].annotation  # type: ignore[assignment]
            section = path.rpartition(".")[0]
            names = [f"{section}.{name}".strip(".") for name in known.model_fields]
            raise unknown_name("setting", path, names or ["none"]) from None
        raise FedncaError(describe(error, path)) from None


def describe(error: ValidationError, path: str = "", value: object = None) -> str:
    """Describe the first problem of a validation error in one sentence."""
    problem = error.errors()[0]
    where = path or ".".join(str(part) for part in problem["loc"])
    got = problem["input"] if value is None else value
    if problem["type"] == "missing":
        return f"setting '{where}' is missing"
    if problem["type"] == "value_error":
        return f"setting '{where}': {problem['ctx']['error']}"
    message = re.sub(r"^[A-Z]\w* (?=should )", "", problem["msg"]).partition(", unable")[0]  # Input, Value, String, …
    return f"setting '{where}' {message}, not {got!r}"
