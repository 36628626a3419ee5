"""One message to each of several sites, and the answers that come in time."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fednca.base.errors import FedncaError

T = TypeVar("T")
Read = Callable[[str, RecordDict], T]  # what a site's answer says; FedncaError tells why it does not count

POLL = (0.1, 0.5)  # fewest and most seconds between two looks for an answer
WAITED = 0.1  # share of the time waited so far after which to look again
KNOWN = {
    int(ErrorCode.NODE_UNAVAILABLE): "it went offline",
    int(ErrorCode.MESSAGE_UNAVAILABLE): "it did not answer in time",
    int(ErrorCode.REPLY_MESSAGE_UNAVAILABLE): "it did not answer in time",
}
WATCH = 2.0  # seconds between two looks at who is connected


@dataclass(frozen=True)
class Answers(Generic[T]):
    """By site: what it answered, or why its answer does not count."""

    replies: dict[str, T] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def connections(grid: Grid) -> dict[int, str]:
    """Return the connected nodes, each with the time at which it connected."""
    return {node.node_id: node.last_activated_at for node in grid.get_nodes()}


def exchange(grid: Grid, messages: Mapping[str, Message], deadline: float, read: Read[T]) -> Answers[T]:
    """Send each site its message and read answers until all are there or `deadline` seconds have passed.

    Each answer is fetched in its own thread, so a site that dies during its upload holds up nobody else. An answer is
    read as soon as it comes, while other sites are still at work.
    """
    answers = Answers[T]()
    before = connections(grid)
    nodes = {site: message.metadata.dst_node_id for site, message in messages.items()}
    over = threading.Event()
    try:
        pushed = set(grid.push_messages(list(messages.values())))  # together, so that what they share is sent once
        pending: dict[Future[Message | None], str] = {}
        for site, message in messages.items():
            if message.metadata.message_id in pushed:
                pending[fetch_later(grid, message.metadata.message_id, over)] = site
            else:
                answers.missing[site] = "the SuperLink did not accept the message for it"
        began = time.monotonic()
        while pending:
            left = began + deadline - time.monotonic()
            done, _ = wait(pending, timeout=max(0.0, min(WATCH, left)), return_when="FIRST_COMPLETED")
            for future in done:
                site = pending.pop(future)
                try:
                    answers.replies[site] = read(site, content_of(future))
                except FedncaError as refusal:
                    answers.missing[site] = str(refusal)
            if left <= 0:
                answers.missing.update(dict.fromkeys(pending.values(), f"it did not answer within {deadline:g} s"))
                break
            if not done:
                now = connections(grid)
                for future, site in list(pending.items()):
                    if now.get(nodes[site]) != before.get(nodes[site]):
                        answers.missing[site] = "it was restarted" if nodes[site] in now else "it went offline"
                        del pending[future]
    finally:
        over.set()
    return answers


def fetch_later(grid: Grid, message_id: str, over: threading.Event) -> "Future[Message | None]":
    """Fetch an answer in a thread of its own until it comes or `over` is set."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="answers")
    answer = pool.submit(fetch, grid, message_id, over)
    pool.shutdown(wait=False)
    return answer


def fetch(grid: Grid, message_id: str, over: threading.Event) -> Message | None:
    """Look for the answer to a message until it comes or `over` is set; the longer it takes, the less often."""
    began, (shortest, longest) = time.monotonic(), POLL
    while not over.is_set():
        for reply in grid.pull_messages([message_id]):
            return reply
        over.wait(min(longest, max(shortest, WAITED * (time.monotonic() - began))))
    return None


def content_of(future: "Future[Message | None]") -> RecordDict:
    """Return what a fetched answer holds; FedncaError says why there is none."""
    error = future.exception()
    reply = None if error else future.result()
    if reply is None:
        raise FedncaError(f"its answer could not be fetched ({type(error).__name__})")
    if reply.has_error():
        reason = KNOWN.get(reply.error.code) or reply.error.reason or f"it answered with error {reply.error.code}"
        raise FedncaError(reason.partition("\n")[0][:200])
    return reply.content
