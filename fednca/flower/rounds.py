"""One round over the network: who takes part, what they are sent, what of their answers counts."""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor, nn

from fednca.config import Config
from fednca.engine.checkpoint import State
from fednca.engine.eager import Result
from fednca.engine.loop import Record, better, check_weights, choose_clients, describe_round, shares
from fednca.errors import FedncaError, RunFailedError
from fednca.flower.checks import (
    check_norm,
    largest_norm,
    read_histograms,
    read_tensors,
    read_update,
    rehearse,
    rehearse_closing,
)
from fednca.flower.config import ServerConfig
from fednca.flower.evaluate import judge
from fednca.flower.exchange import Answers, Read, T, exchange
from fednca.flower.ledger import Ledger
from fednca.flower.privacy import local_deviation, noise_average, privatize_update
from fednca.flower.records import to_arrays
from fednca.flower.roster import Roster
from fednca.flower.tasks import TASK, Task
from fednca.methods.base import Method, Server, Tensors

LOG = logging.getLogger("flwr.fednca")
CLOSE = f"{MessageType.QUERY}.close"


@dataclass(frozen=True)
class Judged:
    """A model as it was judged: weights after the closing exchange, and its thresholds (C,)."""

    server: Server
    thresholds: Tensor


@dataclass(frozen=True)
class Coordinator:
    """What stays the same over the rounds of a run."""

    grid: Grid
    settings: ServerConfig
    config: Config
    method: Method
    model: nn.Module
    classes: tuple[str, ...]
    run: str
    roster: Roster
    ledger: Ledger
    folder: Path

    @property
    def sites(self) -> list[str]:
        """All sites; a site's client number is its place in this list."""
        return self.roster.sites

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the weights that are trained."""
        return [name for name, weight in self.model.named_parameters() if weight.requires_grad]

    @cached_property
    def constants(self) -> ArrayRecord:
        """Buffers that are no weights (an ETF, a table of texts), so that all machines have the very same."""
        weights = self.model.state_dict()
        return to_arrays({name: each for name, each in self.model.named_buffers() if name not in weights})

    @cached_property
    def expected(self) -> Result:
        """What an update looks like: names, shapes and dtypes."""
        return rehearse(self.config, self.method, self.model, len(self.classes))

    @cached_property
    def expected_sums(self) -> Tensors:
        """What the sums of the closing exchange look like."""
        return rehearse_closing(self.config, self.method, self.model, len(self.classes))

    def is_over(self, number: int) -> bool:
        """Tell whether no round may follow the one of this number."""
        return number >= self.config.train.rounds or self.ledger.is_spent()

    def task(self, site: str, number: int, accepted: int = 0) -> Task:
        """Return what a site is told."""
        return Task(
            config=self.config,
            run=self.run,
            classes=self.classes,
            round=number,
            client=self.sites.index(site),
            accepted=accepted,
            privacy=self.settings.privacy,
            folder=str(self.folder / "clients") if self.settings.simulated else "",
        )

    def ask(
        self, kind: str, tasks: Iterable[tuple[str, Task]], tensors: Mapping[str, ArrayRecord], read: Read[T]
    ) -> Answers[T]:
        """Send sites their tasks, each with the same tensors, and read their answers."""
        shared = {"constants": self.constants, **tensors}
        messages = {
            site: Message(
                RecordDict({TASK: task.to_record(), **shared}),
                self.roster.present[site].node,
                kind,
                ttl=self.settings.deadline,
                group_id=str(task.round),
            )
            for site, task in tasks
        }
        return exchange(self.grid, messages, self.settings.deadline, read)


def play_round(job: Coordinator, state: State) -> tuple[State, Record, Judged | None]:
    """Train and judge one round more; return the state after it, its line of history, and the model where judged."""
    number, began = state.round + 1, time.perf_counter()
    left_out: dict[str, str] = {}

    # 1. The server chooses who takes part, and waits for enough of them.
    chosen = [job.sites[client] for client in choose_clients(job.config, len(job.sites), number)]
    need = min(job.settings.min_sites, len(chosen))
    job.roster.wait_for(chosen, need, job.settings.wait)
    left_out |= job.roster.absent(chosen)
    check_enough(len(chosen) - len(left_out), need, f"round {number}", left_out)

    # 2. They train from the global weights; what comes too late or is no update is left out.
    results, notes = train_sites(job, state, [site for site in chosen if site not in left_out], left_out)
    for site, reason in left_out.items():
        LOG.warning("round %s: site '%s' is left out: %s", number, site, reason)
    check_enough(len(results), need, f"round {number}", left_out)
    trained = time.perf_counter() - began

    # 3. The server makes the next global model of their updates, in order of client.
    results = privatize(job, state.server, results)
    server = job.method.aggregate(state.server, [r.update for r in results], shares(job.config, results))
    check_weights(server.weights, f"round {number}, after aggregation")
    accepted = {r.update.client: {"accepted": torch.tensor(number)} for r in results}
    state = State(number, server, state.clients | accepted, state.best)

    # 4. The sites judge the global model on their validation and test images.
    record = describe_round(number, results, trained, job.config)
    took_part = [job.sites[result.update.client] for result in results]
    record |= {"took_part": took_part, "left_out": left_out, "notes": notes}
    record |= job.ledger.record()
    judged = None
    if number % job.config.evaluate.every == 0 or job.is_over(number):
        judged, metrics = judge_model(job, server, number)
        record |= metrics
        state = state if judged is None else replace(state, best=better(state.best, record, job.config))
    record["seconds"] = round(time.perf_counter() - began, 3)
    LOG.info("round %s of %s: %s", number, job.config.train.rounds, summary(record))
    return state, record, judged


def train_sites(
    job: Coordinator, state: State, sites: list[str], left_out: dict[str, str]
) -> tuple[list[Result], dict[str, str]]:
    """Let sites train; return the updates that count in order of client, and what must be said of some."""
    accepted = {job.sites[k]: int(own["accepted"]) for k, own in state.clients.items()}
    tasks = [(site, job.task(site, state.round + 1, accepted.get(site, 0))) for site in sites]
    tensors = {"weights": to_arrays(state.server.weights), "received": to_arrays(job.method.send(state.server))}
    noise = local_deviation(job.settings.privacy)
    largest = largest_norm(state.server.weights, job.settings.norm_bound, noise)
    notes = {}

    def read(site: str, content: RecordDict) -> Result:
        result = read_update(content, job.sites.index(site), job.expected)
        check_norm(result.update, state.server, largest, job.config.train.lr)
        check_samples(job.roster, site, result.update.samples)
        if content.metric_records["counts"].get("state_lost"):
            notes[site] = "it began anew with the method's state, since the kept one is gone"
            LOG.warning("round %s: site '%s': %s", state.round + 1, site, notes[site])
        return result

    job.ledger.ask(sites)
    answers = job.ask(MessageType.TRAIN, tasks, tensors, read)
    left_out |= answers.missing
    return sorted(answers.replies.values(), key=lambda result: result.update.client), notes


def check_samples(roster: Roster, site: str, samples: int) -> None:
    """Refuse an update on another number of images than the site has announced, and ask it anew."""
    announced = roster.present[site].images["train"]
    if samples != announced:
        roster.forget(site)
        raise FedncaError(f"it trained on {samples} images where it had announced {announced}")


def check_enough(found: int, need: int, where: str, left_out: Mapping[str, str]) -> None:
    """Stop the run where too few sites are left."""
    if found < need:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in left_out.items())
        raise RunFailedError(f"{where}: {found} of at least {need} sites gave an update ({reasons}); mend and resume")


def privatize(job: Coordinator, server: Server, results: list[Result]) -> list[Result]:
    """Clip and noise the updates where that is the server's part."""
    privacy = job.settings.privacy
    if privacy.mode != "central":
        return results
    clipped = [privatize_update(privacy, server.weights, r.update.weights, job.trainable) for r in results]
    noised = noise_average(privacy, clipped, job.trainable)
    return [
        replace(result, update=replace(result.update, weights=weights))
        for result, weights in zip(results, noised, strict=True)
    ]


def judge_model(job: Coordinator, server: Server, number: int) -> tuple[Judged | None, Record]:
    """Hold the closing exchange where there is one, and let all sites judge the model that comes of it."""
    job.roster.look()
    missing: dict[str, str] = {}
    closed = close_model(job, server, number, missing)
    sent = {} if closed is None else collect_histograms(job, closed, number, missing)
    record: Record = {"not_judged_by": missing} if missing else {}
    for site, reason in missing.items():
        LOG.warning("round %s: site '%s' does not judge: %s", number, site, reason)
    if closed is None or len(sent) < job.settings.min_sites:
        LOG.warning("round %s: the model is not judged, since fewer than %s sites do", number, job.settings.min_sites)
        return None, record
    thresholds, metrics = judge(sent, job.config.calibrate)
    return Judged(closed, thresholds), record | metrics


def close_model(job: Coordinator, server: Server, number: int, missing: dict[str, str]) -> Server | None:
    """Hold the method's closing exchange with all sites; None where too few take part."""
    if not job.method.closes:
        return server
    tasks = [(site, job.task(site, number)) for site in sorted(job.roster.present)]
    tensors = {"weights": to_arrays(server.weights)}
    expected = job.expected_sums
    answers = job.ask(CLOSE, tasks, tensors, lambda _, content: read_tensors(content, "sums", expected))
    missing |= answers.missing
    sums = [answers.replies[site] for site in sorted(answers.replies)]
    return job.method.close_server(server, sums) if len(sums) >= job.settings.min_sites else None


def collect_histograms(job: Coordinator, server: Server, number: int, missing: dict[str, str]) -> dict[str, Tensors]:
    """Let all sites judge a model and return their histograms for val and test."""
    tasks = [(site, job.task(site, number)) for site in sorted(job.roster.present) if site not in missing]
    shape = (2, len(job.classes), job.config.calibrate.bins + 1)

    def read(site: str, content: RecordDict) -> Tensors:
        return read_histograms(content, shape, job.roster.present[site].images)

    answers = job.ask(MessageType.EVALUATE, tasks, {"weights": to_arrays(server.weights)}, read)
    missing |= answers.missing
    return {site: answers.replies[site] for site in sorted(answers.replies)}


def summary(record: Record) -> dict[str, Any]:
    """Return what one line can say of a round."""
    told: dict[str, Any] = {"losses": record["losses"], "left out": sorted(record["left_out"])}
    told |= {part: record[part]["macro_f1"] for part in ("val", "test") if part in record}
    if "privacy" in record:
        told["epsilon"] = record["privacy"]["epsilon"]
    return told
