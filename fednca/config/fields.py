"""Settings as text: parsing a value, and describing what a field takes."""

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.files import is_utf8
from fednca.config.options import describe


def parse_value(path: str, field: FieldInfo, text: str) -> Any:  # noqa: ANN401
    """Convert a flag's text to the field's type; lists are written with commas or as JSON.

    `none` leaves an optional field open, unless it is one of the field's examples and so a value of its own.
    """
    if not is_utf8(text):
        raise FedncaError(f"setting '{path}' is '{text}', which is not UTF-8; rename the file or folder")
    optional = type(None) in get_args(field.annotation)
    if optional and text.lower() in {"none", "null"} and text.lower() not in (field.examples or ()):
        return None
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation)  # type: ignore[arg-type]
    listed = next((kind for kind in get_args(field.annotation) if get_origin(kind) in (tuple, list)), None)
    try:
        return adapter.validate_python(text if listed is None else split_list(text))
    except ValidationError as error:
        if listed is not None and error.errors()[0]["type"] in {"missing", "too_long"}:
            wanted = len(get_args(listed))
            raise FedncaError(f"setting '{path}' should be {wanted} values separated by commas, not {text!r}") from None
        raise FedncaError(describe(error, path, text if listed is None else None)) from None


def split_list(text: str) -> list[Any]:
    """Read a list, written as JSON or with commas between its values.

    >>> split_list("cat, dog"), split_list('["cat", "dog, sitting"]')
    (['cat', 'dog'], ['cat', 'dog, sitting'])
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
        if text.lstrip().startswith("["):
            raise FedncaError(f'list {text} is not valid JSON; put it in single quotes: \'["cat", "dog"]\'') from None
    return found if isinstance(found, list) else [part.strip() for part in text.split(",")]


def parse_options(owner: str, fields: Mapping[str, FieldInfo], texts: Mapping[str, str]) -> dict[str, Any]:
    """Turn texts into the types of a method's or dataset's options."""
    for name in texts:
        if name not in fields:
            raise unknown_name(f"option of {owner}", name, fields)
    return {name: parse_value(name, fields[name], text) for name, text in texts.items()}


def describe_option(field: FieldInfo) -> str:
    """Return an option's description, with its choices if it has any."""
    words = " or ".join(f"`{word}`" for word in choices(field))
    text = field.description or ""
    return f"{text.removesuffix('.')} ({words})." if words else text


def choices(field: FieldInfo) -> list[str]:
    """Return the words a field may be set to; none if it takes other values."""
    return [word for word in get_args(value_type(field)) if isinstance(word, str)]


def value_type(field: FieldInfo) -> Any:  # noqa: ANN401
    """Return a field's type without None."""
    kind: Any = field.annotation
    if type(None) in get_args(kind):
        (kind,) = set(get_args(kind)) - {type(None)}
    return kind
