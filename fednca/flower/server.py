"""The server's side: it begins or resumes a run, and plays its rounds into a folder that `Run` reads."""

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import nn

from fednca.base.devices import cpu_threads
from fednca.base.errors import FedncaError, InUseError, RunFailedError
from fednca.base.files import explain_write, write_atomic
from fednca.config import Config
from fednca.engines.model import build_model, restore_model
from fednca.flower.assignment import ASSIGNMENT, Assignment
from fednca.flower.classes import join_classes
from fednca.flower.config import ServerConfig
from fednca.flower.engine import FlowerEngine
from fednca.flower.ledger import Ledger
from fednca.flower.privacy import check_private, epsilon_after
from fednca.flower.roster import Roster, check_judged
from fednca.flower.site import simulated_names
from fednca.methods import create_method
from fednca.methods.contract import Method
from fednca.runs.callbacks import Callback
from fednca.runs.checkpoint import State, load_last
from fednca.runs.folder import locked, read_json
from fednca.runs.history import Best, Round, truncate_history
from fednca.runs.run import Run
from fednca.runs.training import first_state, play, write_beginning, write_out

LOG = logging.getLogger("flwr.fednca")
TAKE_OVER = 60.0  # seconds to wait for a server that lost its SuperLink to end
TELL = 20.0  # seconds until the log says which sites the start waits for
LOOK = 0.5  # seconds between two attempts to take over the folder

Start = tuple[Config, nn.Module, State]  # the config with all options written out, the model, and where the run stands


def serve(grid: Grid, settings: ServerConfig, *, resume: bool = False) -> Path:
    """Play a run from its beginning or, with `resume`, after its last finished round; return its folder."""
    folder = Path(settings.out)
    if not resume:  # refuse what cannot begin before anything is written
        config = settings.run_config()
        check_fit(settings, config, create_method(config))
        if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
            way_out = "resume its run with resume=true, or name another `out`"
            raise FedncaError(f"'{folder}' holds something already; {way_out}")
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with taken_over(folder, TAKE_OVER if resume else 0.0):  # look inside only once nobody else can change it
        if (folder / "results.json").exists():
            LOG.info("the run in '%s' is finished already", folder)
        else:
            run_in(folder, grid, settings)
    return folder


def run_in(folder: Path, grid: Grid, settings: ServerConfig) -> None:
    """Begin a run in a folder, or resume the one that is there."""
    begun = (folder / "last.safetensors").exists()
    config = kept_config(folder, settings) if begun else settings.run_config()
    method = create_method(config)
    check_fit(settings, config, method)
    run = read_json(folder / "environment.json")["run"] if begun else secrets.token_hex(8)
    sites = simulated_names(config.partition.clients) if settings.simulated else settings.sites
    question = RecordDict({ASSIGNMENT: Assignment(config=config, run=run).to_record()})
    with cpu_threads(config.threads), closing(Roster(grid, sites, question, settings.deadline)) as roster:
        config, model, state = (go_on if begun else begin)(settings, config, method, roster, run)
        ledger = Ledger(folder / "privacy.json", settings.privacy)
        engine = FlowerEngine(grid, settings, config, method, model, run, roster, ledger)
        try:
            play(Run(folder), engine, state, [RoundLog(config.train.rounds)])
        except RunFailedError as error:
            spent = "; another round needs a higher max_epsilon" if engine.ended() else ""
            raise RunFailedError(f"{error} (the log says more; '{folder}' keeps what was finished{spent})") from error
    LOG.info("the run is finished; its folder is '%s'", folder)


@dataclass
class RoundLog(Callback):
    """Writes one line for each round into Flower's log."""

    rounds: int

    def on_note(self, text: str) -> None:
        """Write what a user must know about the run."""
        LOG.warning("%s", text)

    def on_round(self, record: Round, best: Best | None) -> None:
        """Write how a round went."""
        told: dict[str, Any] = {"losses": record.losses, "left out": sorted(record.left_out)}
        told |= {part: record.metrics[part]["macro_f1"] for part in ("val", "test") if part in record.metrics}
        if "privacy" in record.facts:
            told["epsilon"] = record.facts["privacy"]["epsilon"]
        LOG.info("round %s of %s: %s", record.number, self.rounds, told)


@contextmanager
def taken_over(folder: Path, seconds: float) -> Iterator[None]:
    """Lock a run's folder, and wait up to so many seconds for another server to leave it."""
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except InUseError:
                if time.monotonic() >= end:
                    raise
                time.sleep(LOOK)
        yield


def check_fit(settings: ServerConfig, config: Config, method: Method) -> None:
    """Refuse a run that cannot be federated as configured."""
    if method.rule.centralized:
        raise FedncaError("method 'centralized' has no federation; choose a federated one, or run it with `fednca run`")
    check_private(settings.privacy, config, method)
    limit = settings.privacy.max_epsilon
    if settings.privacy.mode != "none" and (spent := epsilon_after(settings.privacy, 1)) > (limit or spent):
        raise FedncaError(f"max_epsilon is {limit:g}, and one round spends {spent:.3g}; raise it, or noise_multiplier")


def begin(settings: ServerConfig, config: Config, method: Method, roster: Roster, run: str) -> Start:
    """Wait for the sites, join their classes, and write what is known before the first round."""
    folder = Path(settings.out)
    roster.classes = tuple(settings.classes or ())
    gather(roster, settings)
    check_judged(roster.present.values())
    joined = join_classes({name: roster.present[name].classes for name in sorted(roster.present)}, settings.classes)
    roster.classes = joined
    model = build_model(config, method, joined, pretrained=config.model.pretrained)
    config = write_out(config, method)
    write_atomic(folder / "config.toml", config.to_toml().encode())
    state = first_state(method, model, len(roster.sites))
    facts = {"note": method.learner.note, "unreadable": [], "run": run, "sites": roster.sites}
    write_beginning(folder, joined, facts | {"privacy": noise_of(settings)}, state)
    return config, model, state


def go_on(settings: ServerConfig, config: Config, method: Method, roster: Roster, run: str) -> Start:
    """Resume a run from its last checkpoint, with the classes and client numbers it began with."""
    folder = Path(settings.out)
    facts = read_json(folder / "environment.json")
    if roster.sites != facts["sites"]:
        began = ", ".join(facts["sites"])
        raise FedncaError(f"the run in '{folder}' began with sites {began}; set them back, or begin a new run")
    if noise_of(settings) != facts["privacy"]:
        noise = ", ".join(f"{name} = {value}" for name, value in facts["privacy"].items())
        raise FedncaError(f"the run in '{folder}' began with {noise}; set them back, as its epsilon holds for these")
    state = load_last(folder)
    truncate_history(folder / "history.jsonl", state.round)
    roster.classes = tuple(facts["classes"])
    gather(roster, settings)
    model = restore_model(config, method, roster.classes, state.constants)
    LOG.info("resuming after round %s of %s", state.round, config.train.rounds)
    return config, model, state


def noise_of(settings: ServerConfig) -> dict[str, Any]:
    """Return the privacy settings that must stay as a run began; the others concern its report and its end."""
    return settings.privacy.model_dump(include={"mode", "clip_norm", "noise_multiplier"})


def kept_config(folder: Path, settings: ServerConfig) -> Config:
    """Return the config that a run began with; later changes to what is trained do not count."""
    kept = Run(folder).config
    if kept.train != settings.run_config().train:
        LOG.warning(
            "the run in '%s' goes on by its config.toml, as it began; what has changed since does not count", folder
        )
    return kept


def gather(roster: Roster, settings: ServerConfig) -> None:
    """Wait for all sites, at most as long as configured, and refuse to start with too few."""
    at_first = min(TELL, settings.wait)
    roster.wait_for(roster.sites, len(roster.sites), at_first)
    if late := roster.absent(roster.sites):
        LOG.info("waiting up to %g s more for %s", settings.wait - at_first, ", ".join(late))
        roster.wait_for(roster.sites, len(roster.sites), settings.wait - at_first)
    absent = roster.absent(roster.sites)
    for name, reason in absent.items():
        LOG.warning("site '%s' is missing at the start: %s", name, reason)
    found = len(roster.sites) - len(absent)
    if found < settings.min_sites:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise RunFailedError(
            f"{found} of at least {settings.min_sites} sites are connected after {settings.wait:g} s "
            f"({reasons}); start the others, and run again"
        )
