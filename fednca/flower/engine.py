"""Flower's sites as an engine: whatever the loop asks of clients becomes one message to each site."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fednca.base.errors import FedncaError, RunFailedError
from fednca.config import Config
from fednca.engines.contract import Engine, Judgement, LeftOut, Totals, Trained
from fednca.engines.local import total
from fednca.flower import checks
from fednca.flower.assignment import ASSIGNMENT, Assignment
from fednca.flower.config import ServerConfig
from fednca.flower.exchange import Answers, Read, T, exchange
from fednca.flower.ledger import Ledger
from fednca.flower.privacy import local_deviation, noise_average, privatize_update
from fednca.flower.records import to_arrays
from fednca.flower.roster import Roster
from fednca.measures.histograms import judge_histograms
from fednca.methods.contract import Method, Server, Tensors
from fednca.models.heads import constants_of

LOG = logging.getLogger("flwr.fednca")
CLOSE = f"{MessageType.QUERY}.close"


@dataclass
class FlowerEngine(Engine):
    """Has sites train, add up and judge where their images are; a client's number is the rank of its name."""

    grid: Grid
    settings: ServerConfig
    config: Config
    method: Method
    model: nn.Module
    run: str
    roster: Roster
    ledger: Ledger
    note: str = ""
    keeps_states: bool = True
    _judges: set[str] | None = field(default=None, init=False)  # who answered every message since this round's training

    @property
    def names(self) -> Sequence[str]:  # type: ignore[override]
        """All sites, connected or not."""
        return self.roster.sites

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained | LeftOut]:
        """Wait for enough of the sites, let them train, and yield their updates once all are in."""
        self._judges = None
        chosen = [self.names[client] for client in clients]
        need = min(self.settings.min_sites, len(chosen))
        self.roster.wait_for(chosen, need, self.settings.wait)
        left_out = self.roster.absent(chosen)
        check_enough(len(chosen) - len(left_out), need, f"round {number}", left_out)
        here = [site for site in chosen if site not in left_out]
        answers = self._train_sites(number, here, server, states)
        left_out |= answers.missing
        for site, reason in left_out.items():
            LOG.warning("round %s: site '%s' is left out: %s", number, site, reason)
        check_enough(len(answers.replies), need, f"round {number}", left_out)
        yield from (LeftOut(self.names.index(site), reason) for site, reason in left_out.items())
        yield from self._privatize(server, sorted(answers.replies.values(), key=lambda each: each.update.client))

    def sums(self, number: int, server: Server, asked: Tensors) -> Totals:
        """Add up the sums that the connected sites send for one exchange of the closing."""
        tensors = {"weights": to_arrays(server.weights), "asked": to_arrays(asked)}
        expected = checks.rehearse_closing(self.config, self.method, self.model, len(self.roster.classes), asked)
        answers = self._ask_all(
            CLOSE, number, tensors, lambda _, content: checks.read_tensors(content, "sums", expected)
        )
        found = [answers.replies[site] for site in sorted(answers.replies)]
        return Totals(total(found) if self._suffices(number, answers) else None, answers.missing)

    def judge(self, number: int, server: Server) -> Judgement:
        """Let the connected sites judge a model on their own images; they send histograms of its scores."""
        shape = (2, len(self.roster.classes), self.config.calibrate.bins + 1)

        def read(site: str, content: RecordDict) -> Tensors:
            return checks.read_histograms(content, shape, self.roster.present[site].images)

        answers = self._ask_all(MessageType.EVALUATE, number, {"weights": to_arrays(server.weights)}, read)
        if not self._suffices(number, answers):
            return Judgement(left_out=answers.missing)
        sent = {site: answers.replies[site] for site in sorted(answers.replies)}
        thresholds, metrics = judge_histograms(sent, self.config.calibrate)
        return Judgement(metrics, thresholds, answers.missing)

    def ended(self) -> str:
        """Return why the privacy budget allows no further round; nothing if it does."""
        return "another one would exceed max_epsilon" if self.ledger.is_spent() else ""

    def facts(self) -> dict[str, Any]:
        """Return how much privacy is spent."""
        return self.ledger.record()

    @cached_property
    def _constants(self) -> ArrayRecord:
        """What the model needs besides its weights; it is sent, so that all machines have the very same."""
        return to_arrays(constants_of(self.model))

    @cached_property
    def _expected(self) -> Trained:
        """An update with the names, shapes and dtypes that all must have."""
        return checks.rehearse(self.config, self.method, self.model, len(self.roster.classes))

    def _ask(
        self,
        kind: str,
        number: int,
        sites: Iterable[str],
        tensors: Mapping[str, ArrayRecord],
        read: Read[T],
        accepted: Mapping[str, int],
    ) -> Answers[T]:
        """Send each site its assignment, all with the same tensors, and read the answers."""
        messages = {}
        for site in sites:
            told = Assignment(
                config=self.config,
                run=self.run,
                classes=self.roster.classes,
                round=number,
                client=self.names.index(site),
                accepted=accepted.get(site, 0),
                privacy=self.settings.privacy,
                folder=str(Path(self.settings.out) / "clients") if self.settings.simulated else "",
            )
            content = RecordDict({ASSIGNMENT: told.to_record(), "constants": self._constants, **tensors})
            node, seconds = self.roster.present[site].node, self.settings.deadline
            messages[site] = Message(content, node, kind, ttl=seconds, group_id=str(number))
        return exchange(self.grid, messages, self.settings.deadline, read)

    def _ask_all(self, kind: str, number: int, tensors: Mapping[str, ArrayRecord], read: Read[T]) -> Answers[T]:
        """Ask all connected sites; from a round's second call on, only those that have answered so far.

        So the exchanges of a closing add up the same sites, and nobody waits twice for a site that fails.
        """
        self.roster.look()
        asked = sorted(self.roster.present if self._judges is None else self._judges)
        absent = self.roster.absent(asked)
        answers = self._ask(kind, number, [site for site in asked if site not in absent], tensors, read, {})
        answers.missing.update(absent)
        for site, reason in answers.missing.items():
            LOG.warning("round %s: site '%s' does not judge: %s", number, site, reason)
        self._judges = set(answers.replies)
        return answers

    def _suffices(self, number: int, answers: Answers[T]) -> bool:
        """Return whether enough sites answered; if not, the model is not judged."""
        if len(answers.replies) >= self.settings.min_sites:
            return True
        LOG.warning("round %s: the model is not judged: fewer than %s sites answered", number, self.settings.min_sites)
        return False

    def _train_sites(
        self, number: int, sites: list[str], server: Server, states: dict[int, Tensors]
    ) -> Answers[Trained]:
        """Let sites train, and read their updates; one that cannot be what was asked for does not count."""
        accepted = {self.names[client]: int(own["accepted"]) for client, own in states.items()}
        tensors = {"weights": to_arrays(server.weights), "received": to_arrays(self.method.rule.send(server))}
        noise = local_deviation(self.settings.privacy)
        largest = checks.largest_norm(server.weights, self.settings.norm_bound, noise)

        def read(site: str, content: RecordDict) -> Trained:
            trained = checks.read_update(content, self.names.index(site), self._expected)
            checks.check_norm(trained.update, server, largest, self.config.train.lr)
            check_samples(self.roster, site, trained.update.samples)
            note = ""
            if content.metric_records["counts"].get("state_lost"):
                note = "it lost what the method keeps there, and started over"
                LOG.warning("round %s: site '%s': %s", number, site, note)
            return replace(trained, state={"accepted": torch.tensor(number)}, note=note)

        self.ledger.ask(sites)
        return self._ask(MessageType.TRAIN, number, sites, tensors, read, accepted)

    def _privatize(self, server: Server, trained: list[Trained]) -> list[Trained]:
        """Clip the updates and add noise, if that is the server's part."""
        privacy = self.settings.privacy
        if privacy.mode != "central":
            return trained
        names = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        clipped = [privatize_update(privacy, server.weights, each.update.weights, names) for each in trained]
        noised = noise_average(privacy, clipped, names)
        return [
            replace(each, update=replace(each.update, weights=weights))
            for each, weights in zip(trained, noised, strict=True)
        ]


def check_samples(roster: Roster, site: str, samples: int) -> None:
    """Refuse an update on more or fewer images than the site announced, and ask it again what it has."""
    announced = roster.present[site].images["train"]
    if samples != announced:
        roster.forget(site)
        raise FedncaError(f"it trained on {samples} images where it had announced {announced}")


def check_enough(found: int, need: int, where: str, left_out: Mapping[str, str]) -> None:
    """Stop the run if too few sites are left."""
    if found < need:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in left_out.items())
        raise RunFailedError(f"{where}: {found} of at least {need} sites took part ({reasons}); fix that and resume")
