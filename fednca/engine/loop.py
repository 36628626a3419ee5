"""The rounds of a federation."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fednca.collapse import measure_collapse
from fednca.config import Config
from fednca.engine.batches import Shard
from fednca.engine.calibrate import pick_thresholds, score_histograms
from fednca.engine.checkpoint import Best, State
from fednca.engine.eager import Result
from fednca.errors import RunFailedError
from fednca.methods.base import Method, Server, Tensors
from fednca.metrics import at_thresholds, multilabel_metrics
from fednca.packed import Packed
from fednca.randomness import numpy_rng

Record = dict[str, Any]  # a round, as a line of history.jsonl


class Engine(Protocol):
    """Executes the local updates of a round, and judges models."""

    note: str  # how it does so, in a sentence; empty where there is nothing to say

    def train(
        self, number: int, clients: Sequence[int], server: Server, states: dict[int, Tensors]
    ) -> Iterator[Result]:
        """Yield each client's result in any order."""

    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives a shard's images, in its order."""

    def close_sums(self, weights: Tensors, shards: Sequence[Shard], batch_size: int) -> list[Tensors]:
        """Return each client's sums for the method's closing exchange of a model with these weights."""

    def close(self) -> None:
        """Give back what the engine holds outside of this process's memory."""


@dataclass(frozen=True)
class Job:
    """What stays the same over the rounds."""

    config: Config
    method: Method
    model: nn.Module
    engine: Engine
    train: list[Shard]  # one per client
    val: Shard  # the clients' validation shares, one after the other
    val_sizes: list[int]
    test: Shard


def run_rounds(
    job: Job, state: State, on_client: Callable[[int, Result], None]
) -> Iterator[tuple[State, Record, bool]]:
    """Yield, after each round from `state.round + 1` on, the state, its history line and whether it is the best yet."""
    config = job.config
    for number in range(state.round + 1, config.train.rounds + 1):
        began = time.perf_counter()

        # 1. The server chooses who takes part.
        chosen = choose_clients(config, len(job.train), number)

        # 2. The chosen clients train from the global weights on their own images.
        results = []
        for result in job.engine.train(number, chosen, state.server, state.clients):
            check_finite(result, number)
            results.append(result)
            on_client(number, result)
        trained = time.perf_counter() - began

        # 3. The server makes the next global model of their updates, in order of client.
        results.sort(key=lambda result: result.update.client)
        server = job.method.aggregate(state.server, [r.update for r in results], shares(config, results))
        check_weights(server.weights, f"round {number}, after aggregation")
        clients = state.clients | {r.update.client: r.state for r in results if r.state}
        state = State(number, server, clients, state.best)

        # 4. The global model is judged on validation and test images.
        record = describe_round(number, results, trained, config)
        is_best = False
        if number % config.evaluate.every == 0 or number == config.train.rounds:
            record |= judge(job, close(job, server), f"round {number}, evaluation")
            best = better(state.best, record, config)
            is_best, state = best is not state.best, replace(state, best=best)
        record["seconds"] = round(time.perf_counter() - began, 3)
        yield state, record, is_best


def choose_clients(config: Config, clients: int, number: int) -> list[int]:
    """Return the round's clients, sorted; at least one."""
    wanted = clients_per_round(config, clients)
    chosen = numpy_rng(config.seed, "participation", number).choice(clients, wanted, replace=False)
    return sorted(int(client) for client in chosen)


def clients_per_round(config: Config, clients: int) -> int:
    """Return how many of the clients take part in a round."""
    return max(1, round(config.train.participation * clients))


def shares(config: Config, results: list[Result]) -> list[float]:
    """Return each client's share in the average; they add up to 1."""
    sizes = [r.update.samples if config.train.weighting == "samples" else 1 for r in results]
    return [size / sum(sizes) for size in sizes]


def check_finite(result: Result, number: int) -> None:
    """Stop the run, naming round, client and term, when a loss or a weight is no longer a finite number."""
    where = f"round {number}, client {result.update.client}"
    for term, value in result.losses.items():
        if not math.isfinite(value):
            raise RunFailedError(f"{where}: the loss term '{term}' became {value}; try a smaller lr or clip_norm")
    check_weights(result.update.weights, where)
    check_weights(result.update.extra, where)


def check_weights(tensors: Tensors, where: str) -> None:
    """Stop the run when a tensor that travels is no longer finite."""
    whole = tensors.vectors if isinstance(tensors, Packed) and tensors.follows(tensors.layout) else tensors
    floats = [tensor for tensor in whole.values() if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return
    if bool(torch.stack([norm.double() for norm in torch._foreach_norm(floats)]).isfinite().all()):
        return
    for name, tensor in tensors.items():  # a norm may be too large for a float where no number is
        if not bool(torch.isfinite(tensor).all()):
            raise RunFailedError(f"{where}: '{name}' is not finite; try a smaller learning rate or clip_norm")


def judge(job: Job, server: Server, where: str) -> Record:
    """Return the metrics of the server's model on validation and test images, at 0.5 and at calibrated thresholds."""
    val, test = score(job, server)
    check_weights({"scores": torch.cat([val, test])}, where)
    scored = {"val": (val, job.val.labels), "test": (test, job.test.labels)}
    metrics = {name: multilabel_metrics(*own) for name, own in scored.items()}
    thresholds = choose_thresholds(job, val)
    calibrated = {name: at_thresholds(metrics[name], *own, thresholds) for name, own in scored.items()}
    record: Record = {name: own.as_dict() for name, own in metrics.items()}
    record["calibrated"] = {"thresholds": thresholds.tolist()} | {n: own.as_dict() for n, own in calibrated.items()}
    if job.config.evaluate.collapse:
        job.model.load_state_dict(server.weights)
        record["collapse"] = measure_collapse(job.model.eval(), job.val.batches(job.config.evaluate.batch_size))
    return record


def score(job: Job, server: Server) -> tuple[Tensor, Tensor]:
    """Return the probabilities that the server's model gives validation and test images."""
    size = job.config.evaluate.batch_size
    val, test = (job.engine.predict(server.weights, shard, size) for shard in (job.val, job.test))
    return val, test


def better(best: Best | None, record: Record, config: Config) -> Best:
    """Return the best round so far, given that of a round that was judged; of equals the later one."""
    value = record["val"][config.evaluate.select]
    value = -math.inf if value is None else value
    return Best(record["round"], value) if best is None or value >= best.value else best


def describe_round(number: int, results: list[Result], seconds: float, config: Config) -> Record:
    """Return what is known of a round before its evaluation; losses are means over the images trained on."""
    samples = [r.update.samples for r in results]
    terms = sorted({term for r in results for term in r.losses})
    means = {
        term: sum(r.losses.get(term, 0.0) * n for r, n in zip(results, samples, strict=True)) / sum(samples)
        for term in terms
    }
    return {
        "round": number,
        "losses": means,
        "clients": {str(r.update.client): r.losses for r in results},
        "train_seconds": round(seconds, 3),
        "samples_per_second": round(sum(samples) * config.train.local_epochs / max(seconds, 1e-9), 1),
    }


def choose_thresholds(job: Job, val: Tensor) -> Tensor:
    """Return thresholds (C,) from the clients' histograms of their own parts of the validation scores."""
    config = job.config.calibrate
    sizes = job.val_sizes if config.min_count > 1 else [len(val)]  # nothing withheld: the counts of all
    parts = torch.split(val, sizes), torch.split(job.val.labels, sizes)
    sent = [score_histograms(probabilities, labels, config) for probabilities, labels in zip(*parts, strict=True)]
    return pick_thresholds(torch.stack(sent).sum(0), config)


def close(job: Job, server: Server) -> Server:
    """Hold the closing exchange, if the method has one: clients send sums, the server makes the model to use."""
    if not job.method.closes:
        return server
    sums = job.engine.close_sums(server.weights, job.train, job.config.evaluate.batch_size)
    return job.method.close_server(server, sums)
