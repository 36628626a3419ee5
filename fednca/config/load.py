"""Settings from presets and TOML files."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednca.base.errors import FedncaError, unknown_name
from fednca.config.tree import Config, build_config

PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def source_name(source: str | Path) -> str:
    """Return the name of a preset or of a TOML file with settings.

    >>> source_name("dermamnist-0.1"), source_name("my/settings-0.1.toml")
    ('dermamnist-0.1', 'settings-0.1')
    """
    return Path(source).name.removesuffix(".toml")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; report a mistake in one sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedncaError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError as error:  # TOML's and Unicode's errors, and numbers too long to read
        raise FedncaError(f"'{path}' is not valid TOML: {error}") from None


def load_config(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a preset by name or a TOML file by path, then apply the overrides, named by dotted paths.

    >>> load_config("demo", {"train.rounds": 5}).train.rounds
    5
    """
    path = Path(source)
    if path.suffix != ".toml":
        if str(source) not in preset_names():
            raise unknown_name("preset", str(source), preset_names())
        path = PRESETS / f"{source}.toml"
    return build_config(read_toml(path)).replace(overrides or {})
