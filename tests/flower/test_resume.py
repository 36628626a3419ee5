"""A server that was stopped at any moment goes on, and ends with what it would have ended with."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from logging import ERROR

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.common.logger import FLOWER_LOGGER, log
from folders import write_sites
from helpers import Stop, tiny
from in_process import InProcessGrid, assert_same, engine_rounds, serve_until, settings_for, simulated

import fednca.flower.app
import fednca.flower.client
import fednca.flower.server
import fednca.runs.checkpoint
from fednca.base.errors import FedncaError, RunFailedError
from fednca.flower.server import serve
from fednca.runs import Run
from fednca.runs.checkpoint import save_checkpoint
from fednca.runs.folder import locked
from fednca.use.model import TrainedModel


@pytest.mark.parametrize("name", ["scaffold", "fedcurv", "fedadam", "spherefed", "fednca-ml"])
def test_a_server_killed_in_a_round_and_resumed_ends_with_the_same_weights(name, tmp_path):
    config = tiny(method__name=name, train__rounds=4)
    expected = engine_rounds(config, [[0, 1, 2]] * 4)
    grid, settings = simulated(), settings_for(config, tmp_path)
    serve_until(grid, settings, 3)
    assert len(Run(settings.out).history) == 2

    run = Run(serve(grid, settings, resume=True))
    assert [record["round"] for record in run.history] == [1, 2, 3, 4]
    assert all(record["notes"] == {} for record in run.history)
    assert_same(run.state("last").server, expected)
    assert run.finished
    assert run.state("final").round == run.results["val"]["round"]


def test_a_resumed_run_waits_for_the_end_of_a_server_that_lost_its_superlink(tmp_path, monkeypatch):
    monkeypatch.setattr(fednca.flower.server, "LOOK", 0.05)
    config = tiny(method__name="fedavg", train__rounds=1)
    settings, folder = settings_for(config, tmp_path), tmp_path / "run"
    folder.mkdir()
    held = ExitStack()
    held.enter_context(locked(folder))
    with pytest.raises(FedncaError, match="in use by another process"):
        serve(simulated(), settings)
    leaves = threading.Timer(1.0, held.close)
    leaves.start()
    run = Run(serve(simulated(), settings, resume=True))
    assert leaves.finished.is_set()
    assert_same(run.state("last").server, engine_rounds(config, [[0, 1, 2]]))
    monkeypatch.setattr(fednca.flower.server, "TAKE_OVER", 0.2)
    (folder / "results.json").unlink()
    with locked(folder), pytest.raises(FedncaError, match="in use by another process"):
        serve(simulated(), settings, resume=True)


def test_a_lock_that_cannot_be_taken_at_all_is_not_waited_for(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    (tmp_path / "run/.lock").mkdir(parents=True)  # as where nothing can be written
    with pytest.raises(FedncaError, match="cannot write"):
        serve(simulated(), settings_for(tiny(), tmp_path), resume=True)
    assert waited == []


def test_a_run_that_ends_while_a_resumed_one_waits_for_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fednca.flower.server, "LOOK", 0.05)
    settings = settings_for(tiny(method__name="fedavg", train__rounds=1), tmp_path)
    first, second, asked = simulated(), simulated(), threading.Event()

    def slow(message, reply):  # no checkpoint is there yet
        if message.metadata.message_type == "query":
            asked.set()
            time.sleep(0.5)
        return reply

    first.nodes[1000].fault = slow
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(serve, first, settings)
        assert asked.wait(60)
        again = pool.submit(serve, second, settings, resume=True)
        assert run.result() == again.result()
    assert second.sent == []


def test_what_is_in_the_way_of_a_new_run_is_told(tmp_path):
    settings = settings_for(tiny(), tmp_path)
    (tmp_path / "run").write_text("a file")
    with pytest.raises(FedncaError, match="holds something already"):
        serve(simulated(), settings)


def test_a_quoted_false_does_not_resume(tmp_path):
    asked = {"server": str(tmp_path / "server.toml"), "resume": "false"}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=asked)
    with pytest.raises(FedncaError, match="without quotes; found 'false'"):
        fednca.flower.app.run(simulated(), context)


def test_flower_logs_the_sentence_of_a_mistake_without_a_traceback(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    monkeypatch.setattr(FLOWER_LOGGER, "filters", [])
    asked = {"server": str(tmp_path / "server.toml"), "resume": False}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=asked)
    with pytest.raises(FedncaError) as mistake:
        fednca.flower.app.run(simulated(), context)
    for error in (mistake.value, ValueError("a defect of ours")):
        log(ERROR, "%s raised an exception", "ServerApp", exc_info=error)  # as Flower does with whatever comes out
    mended, defect = map(caplog.handler.format, caplog.records)
    assert "Traceback" not in mended
    assert f"ServerApp raised an exception: {mistake.value}" in mended
    assert "ValueError: a defect of ours" in defect


def test_a_resumed_run_has_the_classes_it_began_with(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=2)
    grid, settings = simulated(), settings_for(config, tmp_path)
    serve_until(grid, settings, 2)
    run = Run(serve(grid, settings.model_copy(update={"classes": ["cat", "dog"]}), resume=True))
    assert_same(run.state("last").server, engine_rounds(config, [[0, 1, 2]] * 2))


def test_a_resumed_run_needs_no_text_table_of_elsewhere(tmp_path):
    table = tmp_path / "texts.npy"
    np.save(table, np.random.default_rng(0).normal(size=(10, 64)))
    config = tiny(method__name="fedlgt", method__options={"text": str(table)}, train__rounds=2)
    expected = engine_rounds(config, [[0, 1, 2]] * 2)
    grid, settings = simulated(), settings_for(config, tmp_path)
    serve_until(grid, settings, 2)
    table.unlink()
    fednca.flower.client._build.cache_clear()
    run = Run(serve(grid, settings, resume=True))
    assert_same(run.state("last").server, expected)
    assert TrainedModel(run).model.head.texts.shape == (10, 64)


def test_a_federation_that_could_not_be_judged_does_not_begin(tmp_path):
    table = write_sites(tmp_path / "sites", {"north": ["digit 0", "digit 1"]}, images=12)["north"].parent / "labels.csv"
    rows = [line.split(",") for line in table.read_text().splitlines()]
    table.write_text("\n".join(",".join([row[0], "patient" if row[1] == "split" else "p", *row[2:]]) for row in rows))
    grid = InProcessGrid({"site": str(table.parent / "site.toml")})
    settings = settings_for(tiny(method__name="fedavg"), tmp_path, sites=["north"], min_sites=1)
    with pytest.raises(FedncaError, match="no site has validation images; mark some rows of a site's table with split"):
        serve(grid, settings)


def test_a_run_killed_before_its_first_round_starts_anew_with_resume(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1)
    settings = settings_for(config, tmp_path)
    run = Run(serve(simulated(), settings, resume=True))
    assert_same(run.state("last").server, engine_rounds(config, [[0, 1, 2]]))


def test_a_run_stops_below_the_minimum_says_why_and_can_be_resumed(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=3)
    grid = simulated()
    settings = settings_for(config, tmp_path, wait=0.5)

    def die(message, reply):
        if message.metadata.message_type == "evaluate" and message.metadata.group_id == "1":
            grid.gone = [grid.nodes.pop(1000), grid.nodes.pop(999)]
        return reply

    grid.nodes[998].fault = die
    with pytest.raises(RunFailedError, match=r"round 2: 1 of at least 2 sites .*client-0000: it is not connected"):
        serve(grid, settings)
    grid.nodes |= {1000: grid.gone[0], 999: grid.gone[1]}
    run = Run(serve(grid, settings, resume=True))
    assert_same(run.state("last").server, engine_rounds(config, [[0, 1, 2]] * 3))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_best_model_survives_a_kill_at_any_moment_of_keeping_it(moment, tmp_path, monkeypatch):
    config = tiny(method__name="fedavg", train__rounds=4, train__lr=5e-3, evaluate__select="macro_auc")
    expected = Run(serve(simulated(), settings_for(config, tmp_path)))
    best = expected.results["val"]["round"]
    assert best > 1  # or there would be nothing to lose

    def save(path, state):
        if moment == "before" and path.name == "last.safetensors" and state.round == best:
            raise Stop
        save_checkpoint(path, state)
        if moment == "after" and path.name == "last.safetensors" and state.round == best:
            raise Stop

    (tmp_path / "again").mkdir()
    settings = settings_for(config, tmp_path / "again")
    with monkeypatch.context() as patch:
        patch.setattr(fednca.runs.checkpoint, "save_checkpoint", save)
        with pytest.raises(Stop):
            serve(simulated(), settings)
    run = Run(serve(simulated(), settings, resume=True))
    assert run.results["val"]["round"] == best
    for which in ("best", "final", "last"):
        assert run.state(which).round == expected.state(which).round
        assert_same(run.state(which).server, expected.state(which).server)
    assert not list((tmp_path / "again/run").glob("next*"))


def test_a_run_whose_only_judged_round_nobody_judges_stops_and_can_be_resumed(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=2, evaluate__every=2)
    grid, settings = simulated(), settings_for(config, tmp_path)
    for node in grid.nodes.values():
        node.fault = lambda message, reply: None if message.metadata.message_type == "evaluate" else reply
    with pytest.raises(RunFailedError, match="no model was judged by enough clients"):
        serve(grid, settings.model_copy(update={"deadline": 2.0}))
    assert [record["round"] for record in Run(settings.out).history] == [1]
    for node in grid.nodes.values():
        node.fault = lambda message, reply: reply
    run = Run(serve(grid, settings, resume=True))
    assert run.results["val"]["round"] == 2
    assert_same(run.state("final").server, engine_rounds(config, [[0, 1, 2]] * 2))
