"""Worker processes against the eager engine, bit for bit."""

import multiprocessing
import threading
from dataclasses import replace

import pytest
import torch
from helpers import tiny
from parity import assert_same, assert_same_results, start, timeless

import fednca.engines.processes
from fednca.base.devices import cpu_threads
from fednca.base.randomness import GLOBAL
from fednca.engines.contract import Trained
from fednca.engines.eager import EagerEngine
from fednca.engines.images import Shard
from fednca.engines.processes import ProcessEngine
from fednca.methods import find_method, method_names
from fednca.runs import train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")
FEDERATED = [name for name in method_names() if not find_method(name).rule.centralized]


@pytest.mark.parametrize("name", FEDERATED)  # fedlgt among them, with dropout
def test_every_method_trains_as_in_one_process_with_any_number_of_workers(name):
    place, server = start(tiny(method__name=name))
    first = list(EagerEngine(place).train(1, [0, 1, 2], server, {}))
    updates = [result.update for result in first]
    later = place.method.rule.combine(server, updates, [0.2, 0.3, 0.5], len(place.train))
    states = {result.update.client: result.state for result in first}
    second = list(EagerEngine(place).train(2, [0, 2], later, states))
    for workers in (1, 2, 3):
        engine = ProcessEngine(place, workers)
        assert_same_results(engine.train(1, [0, 1, 2], server, {}), first)
        assert_same_results(engine.train(2, [0, 2], later, states), second)
        assert len(multiprocessing.active_children()) == workers
        engine.close()


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_every_precision_travels(precision):
    place, server = start(tiny(train__precision=precision, train__augment={"hflip": True, "rotate": 10.0}))
    engine = ProcessEngine(place, 2)
    found = list(engine.train(1, [0, 1, 2], server, {}))
    probabilities = engine.predict(server.weights, place.test, 16)
    engine.close()
    assert_same_results(found, EagerEngine(place).train(1, [0, 1, 2], server, {}))
    assert_same(probabilities, EagerEngine(place).predict(server.weights, place.test, 16))


@pytest.mark.parametrize("name", ["fedcurv", "fedadam"])  # both servers keep more than they send
def test_workers_are_told_what_the_server_sends_and_nothing_else(name, monkeypatch):
    place, server = start(tiny(method__name=name))
    engine = ProcessEngine(place, 2)
    told = []
    usual = fednca.engines.processes.Worker.send
    monkeypatch.setattr(
        fednca.engines.processes.Worker, "send", lambda self, message: (told.append(len(message)), usual(self, message))
    )
    list(engine.train(1, [0, 1, 2], server, {}))
    engine.close()
    kept, sent = (
        sum(tensor.nbytes for each in parts for tensor in each.values())
        for parts in ((server.weights, server.state), (server.weights, place.method.rule.send(server)))
    )
    assert sent < max(told) < min(1.2 * sent, kept)


def test_workers_have_one_thread_where_their_parent_has_used_several(fedavg):
    place, server, engine = fedavg
    with cpu_threads(2):
        torch.ones(1000, 1000).sum()  # large enough for torch to start its threads
        found = list(engine.train(1, [0, 1, 2], server, {}))
    assert_same_results(found, EagerEngine(place).train(1, [0, 1, 2], server, {}))


@pytest.mark.parametrize(("name", "participation"), [("fednca-ml", 1.0), ("scaffold", 0.7), ("spherefed", 0.7)])
def test_a_run_ends_as_in_one_process(name, participation, tmp_path):
    config = tiny(method__name=name, train__participation=participation, evaluate__batch_size=16)
    expected = train(config, tmp_path / "eager")
    found = train(config.replace({"engine": "processes", "workers": 2}), tmp_path / "processes")
    for which in ("last", "best", "final"):
        a, b = found.state(which), expected.state(which)
        assert (a.round, a.best, a.clients.keys()) == (b.round, b.best, b.clients.keys())
        assert_same(a.server.weights, b.server.weights)
        assert_same(a.server.state, b.server.state)
        assert_same(a.clients, b.clients)
    assert timeless(found.history) == timeless(expected.history)
    assert found.results == expected.results


@pytest.mark.parametrize(
    ("images", "batch_size", "at_work"),
    [(1, 16, 1), (16, 16, 1), (17, 16, 1), (18, 16, 2), (75, 16, 2), (75, 1000, 1), (1, 1, 1), (2, 1, 1), (5, 1, 2)],
)
def test_every_batch_is_predicted_as_in_one_process(fedavg, images, batch_size, at_work):
    place, server, _ = fedavg
    shard = Shard(place.test.store, place.test.rows[:images], place.test.labels[:images])
    engine = ProcessEngine(replace(place, test=shard), 2)
    found = engine.predict(server.weights, shard, batch_size)
    assert len(multiprocessing.active_children()) == at_work
    engine.close()
    assert_same(found, EagerEngine(place).predict(server.weights, shard, batch_size))


def test_clients_and_strangers_are_predicted_too(fedavg):
    place, server, engine = fedavg
    stranger = Shard(place.test.store, place.test.rows[:20], place.test.labels[:20])
    for shard in (place.train[1], stranger):
        assert_same(engine.predict(server.weights, shard, 16), EagerEngine(place).predict(server.weights, shard, 16))


def test_clients_and_strangers_close_as_in_one_process():
    place, server = start(tiny(method__name="spherefed"))
    engine = ProcessEngine(place, 2)
    stranger = Shard(place.test.store, place.test.rows[:20], place.test.labels[:20])
    several, eager = (place.train, [place.train[1], stranger]), EagerEngine(place)
    found = [engine.client_sums(server.weights, shards, 16, {}) for shards in several]
    engine.close()
    expected = [eager.client_sums(server.weights, shards, 16, {}) for shards in several]
    assert_same(found, expected)


def test_what_is_left_unfinished_does_not_disturb_what_follows(fedavg):
    place, server, engine = fedavg
    expected = list(EagerEngine(place).train(1, [0, 1, 2], server, {}))
    unfinished = engine.train(1, [0, 1, 2], server, {})
    next(unfinished)
    assert_same(
        engine.predict(server.weights, place.test, 16), EagerEngine(place).predict(server.weights, place.test, 16)
    )
    assert len(list(unfinished)) == 2

    unfinished = engine.train(1, [0, 1, 2], server, {})
    next(unfinished)
    unfinished.close()
    assert multiprocessing.active_children() == []
    assert_same_results(engine.train(1, [0, 1, 2], server, {}), expected)


def test_workers_start_while_another_thread_holds_the_lock_of_the_global_generators(fedavg):
    place, server, engine = fedavg
    found = []
    training = threading.Thread(target=lambda: found.extend(engine.train(1, [0, 1, 2], server, {})), daemon=True)
    with GLOBAL:
        training.start()
        training.join(0.5)  # it is about to start its workers, or has started them with a lock that nobody opens
    training.join(60)
    assert_same_results(found, EagerEngine(place).train(1, [0, 1, 2], server, {}))


def test_two_threads_train_side_by_side(fedavg):
    place, server, engine = fedavg
    other = ProcessEngine(place, 2)
    found: dict[str, list[Trained]] = {}

    def work(name, engine):
        found[name] = list(engine.train(1, [0, 1, 2], server, {}))

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in (("one", engine), ("other", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    expected = list(EagerEngine(place).train(1, [0, 1, 2], server, {}))
    assert_same_results(found["one"], expected)
    assert_same_results(found["other"], expected)
