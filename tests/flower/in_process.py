"""A federation without a network: a Grid that hands each message to the ClientApp of its node, in this process.

And what the engine makes of the same rounds.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from helpers import Stop
from parity import next_server, start

from fednca.config import Config
from fednca.engines.eager import EagerEngine
from fednca.flower.app import client
from fednca.flower.config import ServerConfig
from fednca.flower.server import serve
from fednca.methods.contract import Server

Fault = Callable[[Message, Message], Message | None]


@dataclass
class Node:
    """A SuperNode: what it is configured with, since when it is connected, and what is wrong with it."""

    config: dict
    since: str = "1"
    registered: str = ""
    fault: Fault = lambda message, reply: reply
    asked: list[str] = field(default_factory=list)


class InProcessGrid(Grid):
    """Answers at once; a fault changes a node's answer or, with None, withholds it."""

    def __init__(self, *configs: dict) -> None:
        self.nodes = {1000 - number: Node(config) for number, config in enumerate(configs)}
        self.replies: dict[str, Message | None] = {}
        self.sent: list[tuple[Message, Message | None]] = []
        self.numbers = itertools.count()

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **options):
        raise NotImplementedError

    def get_nodes(self):
        return [
            NodeInfo(node_id=number, last_activated_at=node.since, name=node.registered)
            for number, node in self.nodes.items()
        ]

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        pushed = []
        for message in messages:
            node = self.nodes[message.metadata.dst_node_id]
            node.asked.append(message.metadata.message_type)
            message.metadata.__dict__["_message_id"] = f"message-{next(self.numbers)}"
            context = Context(0, message.metadata.dst_node_id, node.config, RecordDict(), {})
            reply = node.fault(message, client(message, context))
            self.replies[message.metadata.message_id] = reply
            self.sent.append((message, reply))
            pushed.append(message.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids):
        return [reply for each in message_ids if (reply := self.replies[each]) is not None]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def simulated(clients: int = 3) -> InProcessGrid:
    """Return a grid of clients of the config's own partition."""
    return InProcessGrid(*({"partition-id": client} for client in range(clients)))


def settings_for(config: Config, folder: Path, **changes: object) -> ServerConfig:
    """Return a server's settings for a run in a folder."""
    (folder / "run.toml").write_text(config.to_toml())
    options = {"wait": 2.0, "deadline": 60.0} | changes
    return ServerConfig(config=str(folder / "run.toml"), out=str(folder / "run"), **options)


def is_train(message: Message) -> bool:
    """Tell whether a site is asked to train."""
    return message.metadata.message_type == "train"


def serve_until(grid: InProcessGrid, settings: ServerConfig, number: int) -> None:
    """Kill the server in a round in which client 0 has trained and kept its state, and client 1 has not answered."""

    def kill(message: Message, reply: Message) -> Message:
        if is_train(message) and message.metadata.group_id == str(number):
            raise Stop
        return reply

    grid.nodes[999].fault = kill
    with pytest.raises(Stop):
        serve(grid, settings)
    grid.nodes[999].fault = lambda message, reply: reply


def engine_rounds(config, took_part) -> Server:
    """Return what the engine makes of rounds in which only some clients take part."""
    place, server = start(config)
    engine, states = EagerEngine(place), {}
    for number, clients in enumerate(took_part, start=1):
        results = list(engine.train(number, clients, server, states))
        server = next_server(place, server, results)
        states |= {r.update.client: r.state for r in results if r.state}
    return server


def assert_same(found: Server, expected: Server) -> None:
    """Compare weights, buffers and the method's own tensors, dtypes too."""
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.state, expected.state, rtol=0, atol=1e-6)
