"""The reference engine, which trains clients one after another; the other engines must agree with it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from fednca.engines.contract import Trained
from fednca.engines.images import Shard
from fednca.engines.local import LocalEngine, Workplace
from fednca.engines.local_update import Trainer
from fednca.methods.contract import Server, Tensors


class EagerEngine(LocalEngine):
    """Trains the chosen clients in turn on one model."""

    def __init__(self, place: Workplace) -> None:
        """Take the workplace; training overwrites its model."""
        super().__init__(place)
        self.trainer = Trainer(place.method, place.model, place.config.train, place.config.seed)

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained]:
        """Train the clients from the global weights in round `number`, and yield each one's result."""
        received = self.place.method.rule.send(server)
        for client in clients:
            shard, state = self.place.train[client], states.get(client, {})
            yield self.trainer.update(number, client, shard, server.weights, received, state)

    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives for a shard's images."""
        return self.trainer.predict(weights, shard, batch_size)

    def client_sums(self, weights: Tensors, shards: Sequence[Shard], batch_size: int, asked: Tensors) -> list[Tensors]:
        """Return each client's sums for one exchange of the closing, for a model with these weights."""
        return [self.trainer.sums(weights, shard, batch_size, asked) for shard in shards]
