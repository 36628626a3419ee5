"""The settings of the server and of each site: `server.toml` and `site.toml`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fednca.config import Config, load_config, read_toml, validate
from fednca.config.options import Options

NAME = r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}"


class PrivacyConfig(Options):
    """Differential privacy: noise hides how much any one site's images have changed the weights."""

    mode: Literal["none", "central", "local"] = "none"
    """`none`: no noise; `central`: the server adds it to the average; `local`: each site adds it to its update."""
    clip_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Largest norm of a site's change of the trainable weights; a larger change is scaled down to it."""
    noise_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Standard deviation of the noise, as a multiple of the most that one site can change."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The delta for which epsilon is reported."""
    max_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The run ends before the round in which epsilon would exceed this."""


class ServerConfig(Options):
    """One federated run, as its server sees it; paths are relative to the folder of server.toml."""

    config: str = "demo"
    """What is trained and how: a preset or a TOML file."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Changes to `config`, section by section: `[overrides.train]`, then `rounds = 50`."""
    sites: list[str] = Field(default_factory=list)
    """Names of all sites that may take part; left out: a simulation with the clients of the config's partition."""
    classes: list[str] | None = Field(default=None, min_length=1)
    """Classes in their order; left out: those of the sites at the start, sorted unless all sites list the same."""
    out: str
    """Folder of the run: history, checkpoints, results."""
    min_sites: int = Field(default=2, ge=1)
    """Fewest sites whose updates make a round; with fewer the run stops, and can be resumed."""
    wait: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds to wait for sites that are not connected: for all at the start, for `min_sites` later."""
    deadline: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Seconds that a site may take to answer; a slower one is left out of the round."""
    norm_bound: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """Largest norm of a site's change, as a multiple of the global weights' norm; a larger update is left out."""
    privacy: PrivacyConfig = PrivacyConfig()

    @model_validator(mode="after")
    def _check_sites(self) -> Self:
        for what, names in (("sites", self.sites), ("classes", self.classes or [])):
            if len(set(names)) < len(names):
                raise ValueError(f"a name occurs twice in {what}; name each once")
        if self.sites and self.min_sites > len(self.sites):
            raise ValueError(f"min_sites is {self.min_sites} for {len(self.sites)} sites; lower it or add sites")
        return self

    @property
    def simulated(self) -> bool:
        """Whether clients of the config's partition take the place of sites."""
        return not self.sites

    def run_config(self) -> Config:
        """Return the config of the run, with as many clients as there are sites."""
        config = load_config(self.config, dict(_dotted(self.overrides)))
        own = {"data.name": "folder", "partition.kind": "natural", "partition.clients": len(self.sites)}
        return config.replace({"engine": "eager"} | ({} if self.simulated else own))


def fit_for_a_name(name: str) -> str:
    """Return a site's name if a folder can have it on every machine; else raise ValueError."""
    if not re.fullmatch(NAME, name):
        rule = "begin with a letter from a to z or a digit; letters, digits, spaces and . _ - may follow (64 at most)"
        raise ValueError(f"'{name}' cannot name a site; {rule}")
    return name


class SiteConfig(Options):
    """A site: where its images are, and what it decides itself; paths are relative to the folder of site.toml."""

    name: Annotated[str, AfterValidator(fit_for_a_name)]
    """The site's name, as in `sites` of server.toml."""
    root: str = "."
    """Folder that holds the table of labels and the images."""
    options: dict[str, Any] = Field(default_factory=dict)
    """How the table is read; `fednca datasets folder` lists the options, among them `test_fraction`."""
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training images used for validation, if the table marks none."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """An image that cannot be read stops the site (`fail`), or is left out and counted (`skip`)."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per operation; left out: as in the server's config."""
    state: str = "state"
    """Folder for what the method keeps (of the latest three runs) and for a digest of the data of each run."""
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
