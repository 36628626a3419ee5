"""Which sites are connected: a node is asked who it is when it connects, and no other waits for its answer."""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fednca.base.errors import FedncaError
from fednca.flower.classes import check_known
from fednca.flower.exchange import content_of, fetch_later
from fednca.flower.site import FEWEST

LOG = logging.getLogger("flwr.fednca")
PAUSE = 1.0  # seconds between two looks for sites that are waited for
RETRY = 60.0  # seconds after which a node that is no site is asked again


@dataclass(frozen=True)
class Announced:
    """What a site said about itself."""

    name: str
    node: int
    classes: tuple[str, ...]
    images: dict[str, int]  # train, val, test


@dataclass(frozen=True)
class Question:
    """A node that was asked who it is."""

    since: str  # when the node connected
    asked: float
    answer: "Future[Message | None]"


class Roster:
    """The sites that are connected, by name."""

    def __init__(self, grid: Grid, sites: Sequence[str], question: RecordDict, deadline: float) -> None:
        """Take the sites that may take part, the question for each node, and the seconds it has to answer."""
        self.grid, self.sites, self.question, self.deadline = grid, sorted(sites), question, deadline
        self.classes: tuple[str, ...] = ()  # once they are fixed, who comes later must fit
        self.present: dict[str, Announced] = {}
        self.refused: dict[str, str] = {}  # why a site that is connected cannot take part
        self._questions: dict[int, Question] = {}
        self._open: set[int] = set()  # nodes whose answer has not been looked at
        self._over = threading.Event()

    def close(self) -> None:
        """Stop waiting for answers."""
        self._over.set()

    def absent(self, names: Iterable[str]) -> dict[str, str]:
        """Return, for each of the names that cannot take part, why not."""
        return {name: self.refused.get(name, "it is not connected") for name in names if name not in self.present}

    def forget(self, name: str) -> None:
        """Ask a site again at the next look, because what it said no longer holds."""
        if name in self.present:
            self._questions.pop(self.present.pop(name).node, None)

    def wait_for(self, names: Iterable[str], enough: int, seconds: float) -> None:
        """Look for sites until `enough` of the names are connected or the time is over."""
        wanted, began = set(names), time.monotonic()
        self.look()
        while len(wanted & self.present.keys()) < enough and time.monotonic() - began < seconds:
            answers = [self._questions[node].answer for node in self._open]
            if not answers or not wait(answers, timeout=PAUSE, return_when="FIRST_COMPLETED").done:
                time.sleep(PAUSE)
            self.look()

    def look(self) -> None:
        """Drop sites that are gone or restarted, ask new nodes who they are, and read the answers that have come."""
        nodes = {node.node_id: node for node in self.grid.get_nodes()}
        for name, site in list(self.present.items()):
            node = nodes.get(site.node)
            if node is None or node.last_activated_at != self._questions[site.node].since:
                LOG.warning("site '%s' %s", name, "went offline" if node is None else "was restarted")
                self.forget(name)
        for node in nodes.values():
            if self._is_due(node):
                self._ask(node)
        for number in [number for number in self._open if self._questions[number].answer.done()]:
            self._open.remove(number)
            if number in nodes:
                self._hear(nodes[number], self._questions[number].answer)

    def _is_due(self, node: NodeInfo) -> bool:
        question = self._questions.get(node.node_id)
        if question is None or question.since != node.last_activated_at:
            return True
        is_site = any(site.node == node.node_id for site in self.present.values())
        return not is_site and question.answer.done() and time.monotonic() - question.asked > RETRY

    def _ask(self, node: NodeInfo) -> None:
        message = Message(self.question, node.node_id, MessageType.QUERY, ttl=self.deadline)
        for pushed in filter(None, self.grid.push_messages([message])):
            answer = fetch_later(self.grid, pushed, self._over)
            self._questions[node.node_id] = Question(node.last_activated_at, time.monotonic(), answer)
            self._open.add(node.node_id)

    def _hear(self, node: NodeInfo, answer: "Future[Message | None]") -> None:
        try:
            site = read_site(content_of(answer), node.node_id)
        except FedncaError as error:
            LOG.warning("node %s did not say which site it is: %s", node.node_id, error)
            self.refused |= {node.name: str(error)}  # the name that it is registered with, if any
            return
        try:
            self._check(site, node.name)
        except FedncaError as error:
            LOG.warning("node %s is refused: %s", node.node_id, error)
            self.refused |= {} if site.name in self.present else {site.name: str(error)}
            return
        self.refused.pop(site.name, None)
        self.present[site.name] = site
        LOG.info("site '%s' is connected: classes %s, images %s", site.name, ", ".join(site.classes), site.images)

    def _check(self, site: Announced, registered: str) -> None:
        if site.name not in self.sites:
            raise FedncaError(f"site '{site.name}' is not in the server's list ({', '.join(self.sites)})")
        if registered and registered != site.name:
            raise FedncaError(f"the node registered as '{registered}' says that it is site '{site.name}'")
        if site.name in self.present:
            raise FedncaError(f"site '{site.name}' is already connected, as node {self.present[site.name].node}")
        if site.images["train"] < FEWEST:
            images = site.images["train"]
            raise FedncaError(f"site '{site.name}' has {images} training images; it needs {FEWEST} or more")
        if self.classes:
            check_known(site.name, site.classes, self.classes)


def check_judged(sites: Collection[Announced]) -> None:
    """Refuse a federation in which no site has validation images, or none has test images."""
    for part, name in (("val", "validation"), ("test", "test")):
        if not any(site.images[part] for site in sites):
            raise FedncaError(f"no site has {name} images; mark some rows of a site's table with split '{part}'")


def read_site(content: RecordDict, node: int) -> Announced:
    """Read what a node said about itself."""
    try:
        record = content.config_records["site"]
        name, classes, *counts = (record[key] for key in ("name", "classes", "train", "val", "test"))
    except KeyError as error:
        raise FedncaError(f"its answer has no {error}") from None
    if not isinstance(name, str) or not isinstance(classes, list) or not all(isinstance(each, int) for each in counts):
        raise FedncaError("its answer is not a name, classes and numbers of images")
    images = dict(zip(("train", "val", "test"), map(int, counts), strict=True))  # type: ignore[arg-type]
    return Announced(name, node, tuple(map(str, classes)), images)
