"""The server's side of a run: it starts or goes on, plays the rounds, and writes a run folder that `Run` reads."""

import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fednca.config import Config, build_config, read_toml
from fednca.engine.checkpoint import State, keep_checkpoint, load_checkpoint, load_last, save_checkpoint
from fednca.engine.loop import Record
from fednca.errors import FedncaError, InUseError, RunFailedError
from fednca.files import append_line, explain_write, write_atomic
from fednca.flower.classes import join_classes
from fednca.flower.config import ServerConfig
from fednca.flower.ledger import Ledger
from fednca.flower.privacy import check_private, epsilon_after
from fednca.flower.roster import Roster, check_judged
from fednca.flower.rounds import Coordinator, Judged, play_round
from fednca.flower.site import simulated_names
from fednca.flower.tasks import TASK, Task
from fednca.methods import create_method
from fednca.methods.base import Method, Server
from fednca.runfiles import TEXTS, environment, keep_texts, locked, read_history, read_json, truncate_history
from fednca.runs import select_rounds, write_out
from fednca.setup import build_model, cpu_threads

LOG = logging.getLogger("flwr.fednca")
TAKE_OVER = 60.0  # seconds to wait for the end of a server that has lost its SuperLink
TELL = 20.0  # seconds after which it is told who is waited for
LOOK = 0.5  # seconds between two looks whether it has


def serve(grid: Grid, settings: ServerConfig, *, resume: bool = False) -> Path:
    """Run a federation from its beginning or, with `resume`, from its last finished round; return its folder."""
    folder = Path(settings.out)
    if not resume:
        check_new(folder, settings)
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with taken_over(folder, TAKE_OVER if resume else 0.0):  # what is there counts once nobody else can change it
        if (folder / "results.json").exists():
            LOG.info("the run in '%s' is finished already", folder)
        else:
            run_in(folder, grid, settings)
    return folder


def check_new(folder: Path, settings: ServerConfig) -> None:
    """Refuse a folder that holds something and a run that cannot be federated, before anything is written."""
    config = settings.run_config()
    check_fit(settings, config, create_method(config))
    if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
        raise FedncaError(f"'{folder}' holds something already; go on with resume=true, or give another `out`")


def run_in(folder: Path, grid: Grid, settings: ServerConfig) -> None:
    """Begin a run in a folder, or go on with the one that is there."""
    begun = (folder / "last.safetensors").exists()
    config = kept_config(folder, settings) if begun else settings.run_config()
    method = create_method(config)
    check_fit(settings, config, method)
    run = read_json(folder / "environment.json")["run"] if begun else secrets.token_hex(8)
    with cpu_threads(config.threads), closing(make_roster(grid, settings, config, run)) as roster:
        start = go_on if begun else begin
        job, state = start(settings, config, method, roster, run)
        try:
            play(job, state)
        except RunFailedError as error:
            raise RunFailedError(f"{error} (what was finished is in '{folder}')") from error


@contextmanager
def taken_over(folder: Path, seconds: float) -> Iterator[None]:
    """Lock a run's folder, and wait so long for another server to leave it."""
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
    if method.centralized:
        raise FedncaError("method 'centralized' has no federation; choose a federated one, or run it with `fednca run`")
    check_private(settings.privacy, config, method)
    limit = settings.privacy.max_epsilon
    if settings.privacy.mode != "none" and (spent := epsilon_after(settings.privacy, 1)) > (limit or spent):
        raise FedncaError(f"max_epsilon is {limit:g}, and one round spends {spent:.3g}; raise it, or noise_multiplier")


def begin(
    settings: ServerConfig, config: Config, method: Method, roster: Roster, run: str
) -> tuple[Coordinator, State]:
    """Wait for the sites, agree on classes, and write what the run is before its first round."""
    folder = Path(settings.out)
    roster.classes = None if settings.classes is None else tuple(settings.classes)
    gather(roster, settings)
    check_judged(roster.present.values())
    joined = join_classes({name: roster.present[name].classes for name in sorted(roster.present)}, settings.classes)
    roster.classes = joined
    model = build_model(config, method, joined, pretrained=config.model.pretrained)
    config = write_out(config, method)
    facts = environment() | {"classes": joined, "note": method.learner.note, "unreadable": []}
    facts |= {"run": run, "sites": roster.sites, "privacy": noise_of(settings)}
    (folder / "history.jsonl").unlink(missing_ok=True)  # of a start that was killed
    write_atomic(folder / "config.toml", config.to_toml().encode())
    write_atomic(folder / "environment.json", json.dumps(facts, indent=1).encode())
    keep_texts(folder, joined, model)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    trainable = {name: weights[name] for name, weight in model.named_parameters() if weight.requires_grad}
    state = State(0, Server(weights, method.start_server(trainable)))
    save_checkpoint(folder / "last.safetensors", state)
    ledger = Ledger(folder / "privacy.json", settings.privacy)
    return Coordinator(roster.grid, settings, config, method, model, joined, run, roster, ledger, folder), state


def go_on(
    settings: ServerConfig, config: Config, method: Method, roster: Roster, run: str
) -> tuple[Coordinator, State]:
    """Take up a run where its last checkpoint left it, with the classes and client numbers it began with."""
    folder = Path(settings.out)
    facts = read_json(folder / "environment.json")
    if roster.sites != facts["sites"]:
        raise FedncaError(f"the run in '{folder}' has sites {', '.join(facts['sites'])}; a changed list is a new run")
    if noise_of(settings) != facts["privacy"]:
        noise = ", ".join(f"{name} = {value}" for name, value in facts["privacy"].items())
        raise FedncaError(f"the run in '{folder}' began with {noise}, and its epsilon holds for that; set it back")
    state = load_last(folder)
    truncate_history(folder / "history.jsonl", state.round)
    joined = roster.classes = tuple(facts["classes"])
    gather(roster, settings)
    method.learner.kept_texts = folder / TEXTS
    model = build_model(config, method, joined, pretrained="none")
    ledger = Ledger(folder / "privacy.json", settings.privacy)
    LOG.info("going on after round %s of %s", state.round, config.train.rounds)
    return Coordinator(roster.grid, settings, config, method, model, joined, run, roster, ledger, folder), state


def noise_of(settings: ServerConfig) -> dict[str, Any]:
    """Return what of the privacy settings must stay over a run; the rest says how it is reported and when it ends."""
    return settings.privacy.model_dump(include={"mode", "clip_norm", "noise_multiplier"})


def kept_config(folder: Path, settings: ServerConfig) -> Config:
    """Return the config that a run began with; what server.toml says of it otherwise by now does not count."""
    kept = build_config(read_toml(folder / "config.toml"))
    if kept.train != settings.run_config().train:
        LOG.warning("the run in '%s' goes on as it began; its config.toml counts, not the changed one", folder)
    return kept


def make_roster(grid: Grid, settings: ServerConfig, config: Config, run: str) -> Roster:
    """Return the roster of all that may take part, with nobody on it yet."""
    sites = simulated_names(config.partition.clients) if settings.simulated else settings.sites
    question = RecordDict({TASK: Task(config, run).to_record()})
    return Roster(grid, sites, question, settings.deadline)


def gather(roster: Roster, settings: ServerConfig) -> None:
    """Wait until all sites are there, or as long as configured, and refuse to start with too few."""
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
            f"{found} of at least {settings.min_sites} sites are there after {settings.wait:g} s "
            f"({reasons}); start them, and run again"
        )


def play(job: Coordinator, state: State) -> None:
    """Play the rounds that are left, keeping history and checkpoints, and write the results."""
    while not job.is_over(state.round):
        before = state.best
        state, record, judged = play_round(job, state)
        if state.best is None and job.is_over(state.round):
            break  # it is not kept, so that a resumed run plays it again
        keep(job.folder, state, record, judged if state.best != before else None)
    if state.best is None:
        raise RunFailedError(
            f"no model was judged by {job.settings.min_sites} sites, so none can be chosen; the log says why: mend "
            "and resume, with a higher max_epsilon where it is spent"
        )
    if state.round < job.config.train.rounds:
        LOG.warning("the run ends after round %s: another one would exceed max_epsilon", state.round)
    finish(job, state)


def keep(folder: Path, state: State, record: Record, best: Judged | None) -> None:
    """Write a round: its history, then its checkpoint and its model if that is the best one."""
    append_line(folder / "history.jsonl", json.dumps(record))
    chosen = None
    if best is not None:
        chosen = State(state.round, Server(best.server.weights), best=state.best, thresholds=best.thresholds)
    keep_checkpoint(folder, state, chosen)


def finish(job: Coordinator, state: State) -> None:
    """Write the model to use, and the results at the rounds chosen as in every run, pooled and by site."""
    final = load_checkpoint(job.folder / "best.safetensors")
    to_use = State(final.round, Server(final.server.weights), best=state.best, thresholds=final.thresholds)
    save_checkpoint(job.folder / "final.safetensors", to_use)
    history = read_history(job.folder / "history.jsonl")
    results: dict[str, Any] = select_rounds(history, job.config)
    for chosen in results.values():
        record = history[chosen["round"] - 1]
        chosen |= {key: record[key] for key in ("calibrated", "by_site")} | job.ledger.record()
    write_atomic(job.folder / "results.json", json.dumps(results, indent=1).encode())
    LOG.info("the run is finished; its folder is '%s'", job.folder)
