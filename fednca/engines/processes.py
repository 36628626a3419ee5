"""Clients side by side on a CPU, in worker processes of one thread each.

Results are bit for bit those of the eager engine with one thread. A worker is a fork of this process, so it has model,
method and images without any copying. It receives what the server sends once per round, then one client or one batch
after another, the largest first.
"""

import gc
import io
import multiprocessing
import os
import pickle
import signal
import stat
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fednca.base.errors import FedncaError, RunFailedError
from fednca.base.randomness import GLOBAL
from fednca.data.processes import _start_worker, cores
from fednca.engines.contract import Trained
from fednca.engines.eager import EagerEngine
from fednca.engines.images import Shard, batch_bounds
from fednca.engines.local import LocalEngine, Workplace
from fednca.methods.contract import Server, Tensors

KILLED = "a worker process was killed, perhaps because memory ran out; use fewer workers"
TRIAL_SECONDS = 20


@dataclass(frozen=True)
class TrainClient:
    """The local update of one client in round `number`."""

    number: int
    client: int
    state: Tensors

    def run(self, eager: EagerEngine, shards: Sequence[Shard], sent: "Sent") -> Trained:
        """Train the client."""
        shard = eager.place.train[self.client]
        return eager.trainer.update(self.number, self.client, shard, sent.weights, sent.others, self.state)


@dataclass(frozen=True)
class PredictBatch:
    """The evaluation of one batch: rows `start` to `stop` of a shard."""

    shard: int
    start: int
    stop: int
    batch_size: int

    def run(self, eager: EagerEngine, shards: Sequence[Shard], sent: "Sent") -> tuple[int, Tensor]:
        """Return where the batch starts, and its probabilities."""
        shard, rows = shards[self.shard], slice(self.start, self.stop)
        batch = Shard(shard.store, shard.rows[rows], shard.labels[rows])
        return self.start, eager.predict(sent.weights, batch, self.batch_size)


@dataclass(frozen=True)
class AddUpClient:
    """One client's part in an exchange of the closing."""

    shard: int
    batch_size: int

    def run(self, eager: EagerEngine, shards: Sequence[Shard], sent: "Sent") -> tuple[int, Tensors]:
        """Return the shard's number, and its sums."""
        return self.shard, eager.trainer.sums(sent.weights, shards[self.shard], self.batch_size, sent.others)


Order = TrainClient | PredictBatch | AddUpClient


@dataclass(frozen=True)
class Sent:
    """What a server sends to its clients: the weights, and what the rule or the closing adds to them."""

    weights: Tensors
    others: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """What a worker sends in place of a result."""

    error: BaseException
    trace: str


class ProcessEngine(LocalEngine):
    """Trains the chosen clients in worker processes, forked when they are first needed."""

    def __init__(self, place: Workplace, workers: int) -> None:
        """Take the workplace, which every worker inherits, and the largest number of workers."""
        super().__init__(place)
        self.eager, self.workers = EagerEngine(place), workers
        self.shards = [place.val, place.test, *place.train]
        self.note = f"engine: {workers} processes" + (", one for each core" if workers == cores() else "")
        self._workers: list[Worker] = []

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained]:
        """Train the clients in round `number`, and yield each one's result as soon as it is ready."""
        largest_first = sorted(clients, key=lambda client: -len(self.place.train[client]))
        sent = Sent(server.weights, self.place.method.rule.send(server))
        yield from self._share_out(sent, [TrainClient(number, k, states.get(k, {})) for k in largest_first])

    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives for a shard's images."""
        place = self._place(shard)
        if place is None:
            return self.eager.predict(weights, shard, batch_size)
        largest_first = sorted(batch_bounds(len(shard), batch_size), key=lambda bound: bound[0] - bound[1])
        orders = [PredictBatch(place, start, stop, batch_size) for start, stop in largest_first]
        parts: dict[int, Tensor] = dict(self._share_out(Sent(weights), orders))
        return torch.cat([parts[start] for start in sorted(parts)])

    def client_sums(self, weights: Tensors, shards: Sequence[Shard], batch_size: int, asked: Tensors) -> list[Tensors]:
        """Return each client's sums for one exchange of the closing, for a model with these weights."""
        places = [self._place(shard) for shard in shards]
        if None in places:
            return self.eager.client_sums(weights, shards, batch_size, asked)
        largest_first = sorted((place for place in places if place is not None), key=lambda at: -len(self.shards[at]))
        orders = [AddUpClient(place, batch_size) for place in largest_first]
        found = dict(self._share_out(Sent(weights, asked), orders))
        return [found[place] for place in places]

    def _place(self, shard: Shard) -> int | None:
        """Return the number by which the workers know a shard, or None."""
        return next((place for place, each in enumerate(self.shards) if each is shard), None)

    def close(self) -> None:
        """End the workers, whatever they are doing; the next use starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    def _share_out(self, sent: Sent, orders: Sequence[Order]) -> Iterator[Any]:
        """Yield the orders' results as they come; a worker that is free gets the next order."""
        waiting, told = deque(orders), dump(sent)
        mine = self._free_workers(min(self.workers, len(orders)))
        try:
            for worker in mine:
                worker.send(told)
                worker.give(waiting.popleft())
            while any(worker.busy for worker in mine):
                for worker in answering(mine):
                    result = worker.receive()
                    if waiting:
                        worker.give(waiting.popleft())
                    yield result
        except BaseException:
            self.close()  # a worker may be in the middle of a task, or of a message
            raise

    def _free_workers(self, count: int) -> "list[Worker]":
        """Return this many idle workers, and start those that are missing."""
        free = [worker for worker in self._workers if not worker.busy]
        while len(free) < count:
            free.append(Worker(self.eager, self.shards))
            self._workers.append(free[-1])
        return free[:count]


class Worker:
    """A forked process, and this end of the connection to it."""

    def __init__(self, eager: EagerEngine, shards: Sequence[Shard]) -> None:
        """Start the process."""
        # A fork inherits locks in their present state, and every open end of a connection. Holding this lock makes sure
        # that the fork can use it, and that two engines in two threads do not inherit each other's connections.
        with GLOBAL:
            self.connection, there = multiprocessing.Pipe()
            self.process = fork(serve, there, eager, shards)
            there.close()  # only the process holds it now, so its death closes the connection
        self.busy = False

    def give(self, order: Order) -> None:
        """Let the worker carry out an order."""
        self.busy = True
        self.send(dump(order))

    def send(self, message: memoryview) -> None:
        """Send a dumped message; a worker always listens when it is not busy."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise RunFailedError(KILLED) from error

    def receive(self) -> Any:  # noqa: ANN401
        """Wait for the order's result, or raise the error that came in its place."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise RunFailedError(KILLED) from error
        self.busy = False
        if not isinstance(answer, Failure):
            return answer
        if not isinstance(answer.error, FedncaError):
            answer.error.add_note(f"In a worker process:\n{answer.trace}")
        raise answer.error


def answering(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until some of the busy workers have an answer, and return these."""
    ready = wait([worker.connection for worker in workers if worker.busy])
    return [worker for worker in workers if worker.connection in ready]


def fork(target: Callable[..., None], *arguments: object) -> ForkProcess:
    """Start a forked process that ends with this one."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    with warnings.catch_warnings():
        # A fork has no other threads, so locks that they held stay locked; it needs only locks that torch renews.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        try:
            process.start()
        except OSError as error:
            raise RunFailedError(f"cannot start a worker process ({error.strerror}); use fewer workers") from error
    return process


def serve(connection: Connection, eager: EagerEngine, shards: Sequence[Shard]) -> None:
    """Carry out the parent's orders with what it sent last, until it ends this process."""
    torch.set_num_threads(1)
    _start_worker()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    let_go_of_files()
    gc.freeze()  # what is inherited is not searched for garbage, so its memory stays shared
    sent = Sent({})
    with suppress(EOFError, ConnectionError):  # the parent was killed
        while True:
            message: Sent | Order = connection.recv()
            if isinstance(message, Sent):
                sent = message
            else:
                connection.send_bytes(answer(message, eager, shards, sent))


def answer(order: Order, eager: EagerEngine, shards: Sequence[Shard], sent: Sent) -> memoryview:
    """Return an order's result, or the error it ended with, as bytes."""
    try:
        return dump(order.run(eager, shards, sent))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        trace = "".join(traceback.format_exception(error))
        return dump(Failure(error if can_travel(error) else in_words(error), trace))


def can_travel(error: BaseException) -> bool:
    """Return whether an error can be sent; not every class can be rebuilt from its `args`."""
    try:
        ForkingPickler.loads(dump(error))
    except Exception:  # noqa: BLE001 - whatever the class raises
        return False
    return True


def in_words(error: BaseException) -> BaseException:
    """Return an error with the same message that can be sent."""
    if isinstance(error, FedncaError):
        return RunFailedError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def let_go_of_files() -> None:
    """Point inherited files to nowhere: a run folder's lock must end with the parent, not with its workers."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the listing's own file is closed already
            if number > 2 and stat.S_ISREG(os.fstat(number).st_mode):
                os.dup2(nowhere, number)


class TensorPickler(pickle.Pickler):
    """Sends tensors by value; torch's own way would keep a shared file open for each."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401
        """Pickle a tensor as an array."""
        return (own_tensor, (obj.detach().numpy(),)) if isinstance(obj, Tensor) else NotImplemented


def own_tensor(array: NDArray[Any]) -> Tensor:
    """Return the array as a tensor in torch's own memory, aligned like any other."""
    return torch.from_numpy(array).clone()


def dump(message: object) -> memoryview:
    """Return the bytes that `Connection.recv` turns into the message."""
    buffer = io.BytesIO()
    TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getbuffer()


def forks_can_train() -> bool:
    """Try a backward pass in a fork; if there is a GPU, torch refuses it once this process has run one itself."""
    trial = fork(take_gradient)
    trial.join(TRIAL_SECONDS)
    passed = trial.exitcode == 0
    trial.kill()
    trial.join()
    return passed


def take_gradient() -> None:
    """Run a backward pass and end this process silently, with exit code 0 if it worked."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    with suppress(RuntimeError):
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        os._exit(0)
    os._exit(1)
