"""The rounds of a federation: the one loop, for a laptop, a GPU, a cluster and a hospital network."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fednca.base.errors import RunFailedError
from fednca.base.randomness import numpy_rng
from fednca.base.tensors import check_finite
from fednca.config import Config
from fednca.engines.contract import Engine, Judgement, LeftOut, Trained
from fednca.methods.contract import Method, Server
from fednca.runs.checkpoint import State
from fednca.runs.history import Round, better


@dataclass(frozen=True)
class Finished:
    """A finished round: the state to go on from, the record, and the model if it is the best so far."""

    state: State
    record: Round
    best: State | None


def play_rounds(
    config: Config, method: Method, engine: Engine, state: State, on_client: Callable[[int, Trained], None]
) -> Iterator[Finished]:
    """Play the rounds from `state.round + 1` on."""
    while not is_over(config, engine, state.round):
        number, began = state.round + 1, time.perf_counter()

        # 1. The server chooses who takes part.
        chosen = choose_clients(config, len(engine.names), number)

        # 2. The chosen clients train from the global weights on their own images.
        trained, left_out = [], {}
        for answer in engine.train(number, chosen, state.server, state.clients):
            if isinstance(answer, LeftOut):
                left_out[engine.names[answer.client]] = answer.reason
                continue
            check_update(answer, number)
            trained.append(answer)
            on_client(number, answer)
        seconds = time.perf_counter() - began

        # 3. The server combines their updates, in order of client, into the next global model.
        trained.sort(key=lambda each: each.update.client)
        updates = [each.update for each in trained]
        server = method.rule.combine(state.server, updates, shares(config, trained), len(engine.names))
        check_finite(server.weights, f"round {number}, after aggregation")
        clients = state.clients | {each.update.client: each.state for each in trained if each.state}
        state = replace(state, round=number, server=server, clients=clients)
        record = Round.describe(number, trained, list(engine.names), left_out, seconds, config.train.local_epochs)
        record = replace(record, facts=engine.facts())

        # 4. The closing, if there is one, completes the global model, which is judged on validation and test images.
        best = None
        if number % config.evaluate.every == 0 or is_over(config, engine, number):
            closed, judgement = judge(method, engine, number, server)
            record = replace(record, judgement=judgement)
            if judgement.thresholds is not None:
                now = better(state.best, record, config)
                if now is not state.best:
                    # To use a model, nothing of the rule's own state is needed.
                    best = State(number, Server(closed.weights), {}, now, judgement.thresholds, state.constants)
                state = replace(state, best=now)
        record = replace(record, seconds=round(time.perf_counter() - began, 3))
        yield Finished(state, record, best)


def is_over(config: Config, engine: Engine, number: int) -> bool:
    """Return whether round `number` is the last one."""
    return number >= config.train.rounds or bool(engine.ended())


def choose_clients(config: Config, clients: int, number: int) -> list[int]:
    """Return the clients that take part in round `number`, sorted; at least one."""
    wanted = config.train.clients_per_round(clients)
    chosen = numpy_rng(config.seed, "participation", number).choice(clients, wanted, replace=False)
    return sorted(int(client) for client in chosen)


def shares(config: Config, trained: list[Trained]) -> list[float]:
    """Return each client's share in the average; they add up to 1."""
    sizes = [each.update.samples if config.train.weighting == "samples" else 1 for each in trained]
    return [size / sum(sizes) for size in sizes]


def check_update(trained: Trained, number: int) -> None:
    """Stop the run if a loss or a weight is not finite, with an error that names round, client and term."""
    where = f"round {number}, client {trained.update.client}"
    for term, value in trained.losses.items():
        if not math.isfinite(value):
            raise RunFailedError(f"{where}: the loss term '{term}' became {value}; try a smaller lr or clip_norm")
    check_finite(trained.update.weights, where)
    check_finite(trained.update.extra, where)


def judge(method: Method, engine: Engine, number: int, server: Server) -> tuple[Server, Judgement]:
    """Carry out the method's closing, if it has one, and judge the model that results."""
    left_out: dict[str, str] = {}
    if method.closing is not None:
        exchanges = method.closing.close(server)
        asked = next(exchanges)
        while True:
            totals = engine.sums(number, server, asked)
            left_out |= totals.left_out
            if totals.sums is None:
                return server, Judgement(left_out=left_out)
            try:
                asked = exchanges.send(totals.sums)
            except StopIteration as end:
                server = end.value
                break
    judgement = engine.judge(number, server)
    return server, replace(judgement, left_out=left_out | judgement.left_out)
