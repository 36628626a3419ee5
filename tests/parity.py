"""What an engine does in some rounds, and how far two engines are apart."""

from dataclasses import dataclass

import torch

from fednca.data.load import federate
from fednca.engines.contract import Trained
from fednca.engines.local import LocalEngine, Workplace
from fednca.engines.model import build_model
from fednca.engines.workplace import build_workplace
from fednca.methods import create_method
from fednca.methods.contract import Server, Tensors
from fednca.runs.rounds import choose_clients, shares
from fednca.runs.training import first_state

CLOCKS = {"seconds", "train_seconds", "samples_per_second"}
NO_GRADIENT = "in_proj_bias"  # the attention's key bias is in it, whose true gradient is zero


@dataclass
class Outcome:
    """Everything an engine has an influence on."""

    server: Server
    results: list[Trained]
    states: dict[int, Tensors]
    scores: torch.Tensor
    sums: list[Tensors]  # of the closing's first exchange


def start(config, device="cpu") -> tuple[Workplace, Server]:
    """Build a workplace for an engine, and the server before its first round."""
    method, federation = create_method(config), federate(config)
    model = build_model(config, method, federation.dataset.classes, pretrained="none")
    place = build_workplace(config, method, federation, model, torch.device(device))
    return place, first_state(method, place.model, len(federation.train.partition.clients)).server


def play(engine: LocalEngine, server: Server, rounds: int, states=None, first: int = 1) -> Outcome:
    """Let an engine train some rounds, score the test images and, with methods that have one, begin the closing."""
    place, states, results = engine.place, dict(states or {}), []
    for number in range(first, first + rounds):
        clients = choose_clients(place.config, len(place.train), number)
        results = in_order(engine.train(number, clients, server, states))
        assert [result.update.client for result in results] == clients
        server = next_server(place, server, results)
        states |= {r.update.client: r.state for r in results if r.state}
    size = place.config.evaluate.batch_size
    scores = engine.predict(server.weights, place.test, size)
    sums = [] if place.method.closing is None else closing_sums(engine, server)
    return Outcome(server, results, states, scores, sums)


def next_server(place: Workplace, server: Server, results: list[Trained]) -> Server:
    """Return what the server makes of a round's updates."""
    updates = [result.update for result in results]
    return place.method.rule.combine(server, updates, shares(place.config, results), len(place.train))


def closing_sums(engine: LocalEngine, server: Server) -> list[Tensors]:
    """Return each client's sums for the first exchange of the closing."""
    place = engine.place
    asked = next(place.method.closing.close(server))
    return engine.client_sums(server.weights, place.train, place.config.evaluate.batch_size, asked)


def comparable(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items() if NO_GRADIENT not in name}


def assert_agree(found: Outcome, expected: Outcome, atol: float, state_atol: float | None = None) -> None:
    """Compare weights and buffers, uploads, clients' states, losses, scores and sums of the closing exchange."""
    near = {"rtol": 0, "atol": atol}
    torch.testing.assert_close(comparable(found.server.weights), comparable(expected.server.weights), **near)
    torch.testing.assert_close(found.scores.cpu(), expected.scores.cpu(), **near)
    for mine, reference in zip(found.sums, expected.sums, strict=True):
        torch.testing.assert_close(comparable(mine), comparable(reference), rtol=atol, atol=atol)
    assert found.states.keys() == expected.states.keys()
    loose = {"rtol": 0, "atol": state_atol or atol}
    for client, state in expected.states.items():
        torch.testing.assert_close(comparable(found.states[client]), comparable(state), **loose)
    for mine, reference in zip(found.results, expected.results, strict=True):
        torch.testing.assert_close(comparable(mine.update.extra), comparable(reference.update.extra), **loose)
        assert (mine.update.samples, mine.update.steps) == (reference.update.samples, reference.update.steps)
        assert mine.losses.keys() == reference.losses.keys()
        for term, value in reference.losses.items():
            assert abs(mine.losses[term] - value) <= atol * max(1, abs(value))


def distance_of_updates(found: Server, expected: Server, before: Server) -> float:
    """Return the relative L2 distance of two changes of the same weights."""
    mine, theirs, old = (comparable(server.weights) for server in (found, expected, before))
    floats = [name for name, tensor in old.items() if tensor.is_floating_point()]
    apart = sum((mine[name].double() - theirs[name].double()).square().sum() for name in floats)
    moved = sum((theirs[name].double() - old[name].double()).square().sum() for name in floats)
    return float((apart / moved).sqrt())


def in_order(results):
    return sorted(results, key=lambda result: result.update.client)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_same_results(found, expected):
    for one, other in zip(in_order(found), in_order(expected), strict=True):
        a, b = one.update, other.update
        assert (a.client, a.samples, a.steps, one.losses) == (b.client, b.samples, b.steps, other.losses)
        assert_same(a.weights, b.weights)
        assert_same(a.extra, b.extra)
        assert_same(one.state, other.state)


def timeless(history):
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in history]
