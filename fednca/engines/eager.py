"""The reference engine, which trains clients one after another; the other engines must agree with it."""

from collections.abc import Iterator, Sequence

from fednca.engines.contract import Trained
from fednca.engines.local import LocalEngine
from fednca.methods.contract import Server, Tensors


class EagerEngine(LocalEngine):
    """Trains the chosen clients in turn on the workplace's model, which it overwrites."""

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained]:
        """Train the clients from the global weights in round `number`, and yield each one's result."""
        received = self.place.method.rule.send(server)
        for client in clients:
            shard, state = self.place.train[client], states.get(client, {})
            yield self.trainer.update(number, client, shard, server.weights, received, state)
