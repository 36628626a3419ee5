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
from functools import partial
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
from fednca.engines.images import Shard, batch_bounds
from fednca.engines.local import LocalEngine, Workplace
from fednca.methods.contract import Server, Tensors

KILLED = "a worker process was killed, perhaps because memory ran out; use fewer workers"
TRIAL_SECONDS = 20


@dataclass(frozen=True)
class Sent:
    """What a server sends to its clients: the weights, and what the rule or the closing adds to them."""

    weights: Tensors
    others: Tensors = field(default_factory=dict)


Order = Callable[["ProcessEngine", Sent], Any]  # one of the three functions that follow, with its own arguments


def train_client(engine: "ProcessEngine", sent: Sent, *, number: int, client: int, state: Tensors) -> Trained:
    """Train one client in round `number`."""
    return engine.trainer.update(number, client, engine.place.train[client], sent.weights, sent.others, state)


def predict_batch(
    engine: "ProcessEngine", sent: Sent, *, shard: int, start: int, stop: int, batch_size: int
) -> tuple[int, Tensor]:
    """Score rows `start` to `stop` of a shard, and return where they start, and their probabilities."""
    whole, rows = engine.shards[shard], slice(start, stop)
    batch = Shard(whole.store, whole.rows[rows], whole.labels[rows])
    return start, engine.trainer.predict(sent.weights, batch, batch_size)


def add_up_client(engine: "ProcessEngine", sent: Sent, *, shard: int, batch_size: int) -> tuple[int, Tensors]:
    """Return the shard's id, and its sums for an exchange of the closing."""
    return shard, engine.trainer.sums(sent.weights, engine.shards[shard], batch_size, sent.others)


@dataclass(frozen=True)
class Failure:
    """What a worker sends in place of a result."""

    error: BaseException
    trace: str


class ProcessEngine(LocalEngine):
    """Trains the chosen clients in worker processes, forked when they are first needed."""

    def __init__(self, place: Workplace, workers: int) -> None:
        super().__init__(place)
        self.workers = workers  # at most
        self.shards = {id(shard): shard for shard in (place.val, place.test, *place.train)}  # a fork keeps ids
        self.note = f"engine: {workers} processes" + (", one for each core" if workers == cores() else "")
        self._workers: list[Worker] = []

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Trained]:
        """Train the clients in round `number`, and yield each one's result as soon as it is ready."""
        largest_first = sorted(clients, key=lambda client: -len(self.place.train[client]))
        sent = Sent(server.weights, self.place.method.rule.send(server))
        orders = [partial(train_client, number=number, client=k, state=states.get(k, {})) for k in largest_first]
        yield from self._share_out(sent, orders)

    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives for a shard's images."""
        if id(shard) not in self.shards:
            return super().predict(weights, shard, batch_size)
        largest_first = sorted(batch_bounds(len(shard), batch_size), key=lambda bound: bound[0] - bound[1])
        order = partial(predict_batch, shard=id(shard), batch_size=batch_size)
        orders = [partial(order, start=start, stop=stop) for start, stop in largest_first]
        parts: dict[int, Tensor] = dict(self._share_out(Sent(weights), orders))
        return torch.cat([parts[start] for start in sorted(parts)])

    def client_sums(self, weights: Tensors, shards: Sequence[Shard], batch_size: int, asked: Tensors) -> list[Tensors]:
        """Return each client's sums for one exchange of the closing, for a model with these weights."""
        if any(id(shard) not in self.shards for shard in shards):
            return super().client_sums(weights, shards, batch_size, asked)
        largest_first = sorted(shards, key=len, reverse=True)
        orders = [partial(add_up_client, shard=id(shard), batch_size=batch_size) for shard in largest_first]
        found = dict(self._share_out(Sent(weights, asked), orders))
        return [found[id(shard)] for shard in shards]

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
                ready = wait([worker.connection for worker in mine if worker.busy])
                for worker in [worker for worker in mine if worker.connection in ready]:
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
            free.append(Worker(self))
            self._workers.append(free[-1])
        return free[:count]


class Worker:
    """A forked process, and this end of the connection to it."""

    def __init__(self, engine: ProcessEngine) -> None:
        # A fork inherits locks in their present state, and every open end of a connection. Holding this lock makes sure
        # that the fork can use it, and that two engines in two threads do not inherit each other's connections.
        with GLOBAL:
            self.connection, there = multiprocessing.Pipe()
            self.process = fork(serve, there, engine)
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


def serve(connection: Connection, engine: ProcessEngine) -> None:
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
                connection.send_bytes(answer(message, engine, sent))


def answer(order: Order, engine: ProcessEngine, sent: Sent) -> memoryview:
    """Return an order's result, or the error it ended with, as bytes."""
    try:
        return dump(order(engine, sent))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return dump(Failure(sendable(error), "".join(traceback.format_exception(error))))


def sendable(error: BaseException) -> BaseException:
    """Return an error, or one of the same message, since not every class can be rebuilt from its `args`."""
    try:
        ForkingPickler.loads(dump(error))
    except Exception:  # noqa: BLE001 - whatever the class raises
        own = isinstance(error, FedncaError)
        return RunFailedError(str(error)) if own else RuntimeError(f"{type(error).__name__}: {error}")
    return error


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
