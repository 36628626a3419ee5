"""What the server and each site are told: `server.toml` and `site.toml`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fednca.config import Config, load_config, read_toml, validate
from fednca.options import Options

NAME = r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}"


class PrivacyConfig(Options):
    """Differential privacy of whole sites: how little one site's images can change what others see of the weights."""

    mode: Literal["none", "central", "local"] = "none"
    """No noise; or the server's noise on the average; or each site's own noise on what it sends."""
    clip_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Largest norm of a site's change of the trainable weights; a larger one is scaled down to it."""
    noise_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise, in units of the most that one site can change."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The delta that the epsilon is reported for."""
    max_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """End the run before the round that would spend more than this."""


class ServerConfig(Options):
    """One federated run, as its server sees it; paths are meant from the folder of server.toml."""

    config: str = "demo"
    """Preset, or TOML file, that says what is trained and how."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of that config to change, in its own sections: `[overrides.train]`, then `rounds = 50`."""
    sites: list[str] = Field(default_factory=list)
    """Names of all sites that may take part; left out: a simulation, whose clients the config's partition makes."""
    classes: list[str] | None = Field(default=None, min_length=1)
    """Classes in their order; left out: those that the sites have at the start, sorted unless all list the same."""
    out: str
    """Folder of the run: history, checkpoints, results."""
    min_sites: int = Field(default=2, ge=1)
    """Fewest sites whose updates make a round; with fewer the run stops, and can be resumed."""
    wait: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds to wait for sites that are not connected: at the start for all, later for `min_sites`."""
    deadline: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Seconds a site has to answer; one that needs longer is left out of the round."""
    norm_bound: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Largest norm of a site's change, in units of the global weights' norm; beyond it the update is left out."""
    privacy: PrivacyConfig = PrivacyConfig()

    @model_validator(mode="after")
    def _check_sites(self) -> Self:
        for what, names in (("sites", self.sites), ("classes", self.classes or [])):
            if len(set(names)) < len(names):
                raise ValueError(f"{what} name one twice; name each once")
        if self.sites and self.min_sites > len(self.sites):
            raise ValueError(f"min_sites is {self.min_sites} for {len(self.sites)} sites; lower it or add sites")
        return self

    @property
    def simulated(self) -> bool:
        """Whether the config's partition takes the place of sites."""
        return not self.sites

    def run_config(self) -> Config:
        """Return the config of the run, with as many clients as there are sites."""
        config = load_config(self.config, dict(_dotted(self.overrides)))
        own = {"data.name": "folder", "partition.kind": "natural", "partition.clients": len(self.sites)}
        return config.replace({"engine": "eager"} | ({} if self.simulated else own))


def fit_for_a_name(name: str) -> str:
    """Return a site's name, unless it would not do as a folder's on every machine."""
    if not re.fullmatch(NAME, name):
        rule = "begin with a letter from a to z or a digit, then use these, spaces and . _ - (64 at most)"
        raise ValueError(f"'{name}' cannot name a site; {rule}")
    return name


class SiteConfig(Options):
    """A site: where its images and labels are, and what it decides itself; paths are meant from site.toml's folder."""

    name: Annotated[str, AfterValidator(fit_for_a_name)]
    """The site's name, as in the server's list."""
    root: str = "."
    """Folder of the table of labels and of the images."""
    options: dict[str, Any] = Field(default_factory=dict)
    """How the table is read, as listed by `fednca datasets folder`; `test_fraction` is the test share."""
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training images held out for validation where the table has no validation rows."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """What an image that cannot be read does: stop the site, or be left out and counted."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of an operation; left out: as the server's config says."""
    state: str = "state"
    """Folder for what the method keeps in the latest three runs, and for a digest of the data that each began with."""
    cache: str | None = None
    """Folder where decoded images are kept; left out: the user's cache folder."""


def load_server(path: Path) -> ServerConfig:
    """Read server.toml; its paths become absolute."""
    settings = validate(ServerConfig, read_toml(path))
    config = str(_beside(path, settings.config)) if settings.config.endswith(".toml") else settings.config
    return settings.model_copy(update={"config": config, "out": str(_beside(path, settings.out))})


def load_site(path: Path) -> SiteConfig:
    """Read site.toml; its paths become absolute."""
    site = validate(SiteConfig, read_toml(path))
    paths = {name: str(_beside(path, value)) for name in ("root", "state", "cache") if (value := getattr(site, name))}
    return site.model_copy(update=paths)


def _beside(path: Path, name: str) -> Path:
    return (path.absolute().parent / name).resolve()


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested sections by dotted path; options of datasets and methods stay together."""
    for name, value in values.items():
        if isinstance(value, Mapping) and not name.endswith("options"):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
