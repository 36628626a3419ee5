"""Rounds go on without the sites that fail; the model is then what the engine makes of the others' updates."""

import io
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from helpers import Stop, tiny
from in_process import Node, assert_same, engine_rounds, simulated

import fednca.flower.server
from fednca.engine.checkpoint import save_checkpoint
from fednca.errors import FedncaError, RunFailedError
from fednca.flower import exchange, roster
from fednca.flower.config import ServerConfig
from fednca.flower.records import from_arrays, to_arrays
from fednca.flower.server import serve
from fednca.runfiles import locked
from fednca.runs import Run


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(roster, "PAUSE", 0.05)
    monkeypatch.setattr(exchange, "POLL", (0.02, 0.02))
    monkeypatch.setattr(exchange, "WATCH", 0.1)


def settings_for(config, folder, **changes):
    (folder / "run.toml").write_text(config.to_toml())
    options = {"wait": 2.0, "deadline": 60.0} | changes
    return ServerConfig(config=str(folder / "run.toml"), out=str(folder / "run"), **options)


def changed(part, change):
    """Return a fault that changes the tensors of an answer."""

    def fault(message, reply):
        if message.metadata.message_type == "train":
            tensors = from_arrays(reply.content[part])
            change(tensors)
            reply.content[part] = to_arrays(tensors)
        return reply

    return fault


def counted(**counts):
    """Return a fault that lies about counts."""

    def fault(message, reply):
        if message.metadata.message_type == "train":
            reply.content["counts"] = MetricRecord(dict(reply.content["counts"]) | counts)
        return reply

    return fault


def without(part):
    def fault(message, reply):
        if message.metadata.message_type == "train":
            del reply.content[part]
        return reply

    return fault


def pickled(message, reply):
    if message.metadata.message_type == "train":
        buffer = io.BytesIO()
        np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
        bomb = Array("float32", (1,), "numpy.ndarray", buffer.getvalue())
        reply.content["weights"] = ArrayRecord({"layout": bomb})
    return reply


class Bomb:
    """Raises where it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a site's answer was unpickled",))


def failed(message, reply):
    return Message(Error(7, "out of memory\nat line 3"), reply_to=message) if is_train(message) else reply


def is_train(message):
    return message.metadata.message_type == "train"


def fill(name, value):
    return changed("weights", lambda tensors: tensors[name].fill_(value))


LINEAR = "head.linear.weight"
FAULTS = {
    "hung": (lambda message, reply: None if is_train(message) else reply, "did not answer within"),
    "error": (failed, "out of memory"),
    "nan": (fill(LINEAR, torch.nan), f"'{LINEAR}' is not finite"),
    "inf": (fill("backbone.net.bn1.running_var", torch.inf), "'backbone.net.bn1.running_var' is not finite"),
    "absurd": (fill(LINEAR, 1e9), "change of the weights has norm"),
    "shape": (changed("weights", lambda t: t.update({LINEAR: t[LINEAR][:5]})), f"'{LINEAR}' is float32 of shape (5,"),
    "dtype": (changed("weights", lambda t: t.update({LINEAR: t[LINEAR].double()})), "is float64 of shape"),
    "missing": (changed("weights", lambda t: t.pop(LINEAR)), f"'weights' lack '{LINEAR}'"),
    "unknown": (changed("weights", lambda t: t.update(trojan=torch.zeros(1))), "'weights' have 'trojan'"),
    "extra": (changed("extra", lambda t: t.update(trojan=torch.zeros(1))), "'extra' have 'trojan'"),
    "no weights": (without("weights"), "no 'weights'"),
    "no counts": (without("counts"), "no 'counts'"),
    "samples": (counted(samples=10**9), "1000000000 images where it had announced"),
    "steps": (counted(steps=0), "'steps' is 0"),
    "pickle": (pickled, "cannot be read as tensors"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_site_that_fails_is_left_out_of_the_round_and_named(kind, tmp_path):
    fault, reason = FAULTS[kind]
    config = tiny(method__name="fedavg", train__rounds=1)
    grid = simulated()
    grid.nodes[999].fault = fault  # client 1
    deadline = 3.0 if kind == "hung" else 60.0
    run = Run(serve(grid, settings_for(config, tmp_path, deadline=deadline)))
    (record,) = run.history
    assert list(record["left_out"]) == ["client-0001"]
    assert reason in record["left_out"]["client-0001"]
    assert "\n" not in record["left_out"]["client-0001"]
    assert record["took_part"] == ["client-0000", "client-0002"]
    assert_same(run.state("last").server, engine_rounds(config, [[0, 2]]))


def test_a_poisoned_extra_upload_is_left_out(tmp_path):
    config = tiny(method__name="scaffold", train__rounds=1)
    grid = simulated()
    grid.nodes[1000].fault = changed("extra", lambda tensors: tensors[LINEAR].fill_(1e12))
    run = Run(serve(grid, settings_for(config, tmp_path)))
    assert "extra tensors have norm" in run.history[0]["left_out"]["client-0000"]
    assert_same(run.state("last").server, engine_rounds(config, [[1, 2]]))


@pytest.mark.parametrize("name", ["scaffold", "fedcurv", "fedadam"])
def test_a_late_update_does_not_move_the_state_that_the_site_goes_on_from(name, tmp_path):
    config = tiny(method__name=name, train__rounds=4)
    grid = simulated()

    def late(message, reply):  # it has trained, but nobody hears of it
        return None if is_train(message) and message.metadata.group_id == "2" else reply

    grid.nodes[1000].fault = late
    run = Run(serve(grid, settings_for(config, tmp_path, deadline=3.0)))
    assert [list(record["left_out"]) for record in run.history] == [[], ["client-0000"], [], []]
    assert_same(run.state("last").server, engine_rounds(config, [[0, 1, 2], [1, 2], [0, 1, 2], [0, 1, 2]]))


@pytest.mark.parametrize("name", ["scaffold", "fedcurv", "fedadam", "spherefed", "fednca-ml"])
def test_a_server_killed_in_a_round_and_resumed_ends_with_the_same_weights(name, tmp_path):
    config = tiny(method__name=name, train__rounds=4)
    expected = engine_rounds(config, [[0, 1, 2]] * 4)
    grid = simulated()

    def kill(message, reply):  # after client 0 has trained and kept its state of the round
        if is_train(message) and message.metadata.group_id == "3":
            raise Stop
        return reply

    grid.nodes[999].fault = kill
    settings = settings_for(config, tmp_path)
    with pytest.raises(Stop):
        serve(grid, settings)
    assert len(Run(settings.out).history) == 2

    grid.nodes[999].fault = lambda message, reply: reply
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


def test_a_run_killed_before_its_first_round_starts_anew_with_resume(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1)
    settings = settings_for(config, tmp_path)
    run = Run(serve(simulated(), settings, resume=True))
    assert_same(run.state("last").server, engine_rounds(config, [[0, 1, 2]]))


def test_a_site_whose_state_is_gone_begins_anew_and_that_is_said(tmp_path):
    config = tiny(method__name="scaffold", train__rounds=2)
    grid = simulated()

    def lose(message, reply):
        for path in (tmp_path / "run/clients/client-0002").glob("*"):
            path.unlink()
        return reply

    grid.nodes[998].fault = lose
    run = Run(serve(grid, settings_for(config, tmp_path)))
    assert [list(record["notes"]) for record in run.history] == [[], ["client-0002"]]


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


def test_a_run_does_not_start_with_too_few_sites(tmp_path):
    settings = settings_for(tiny(), tmp_path, wait=0.3, min_sites=3)
    with pytest.raises(RunFailedError, match=r"2 of at least 3 sites .*client-0002: it is not connected"):
        serve(simulated(2), settings)
    assert not (tmp_path / "run/last.safetensors").exists()


def test_a_site_that_joins_late_takes_part_from_then_on(tmp_path):
    config = tiny(method__name="scaffold", train__rounds=3)
    grid = simulated(2)

    def join(message, reply):
        if is_train(message) and message.metadata.group_id == "1":
            grid.nodes[500] = Node({"partition-id": 2})
        return reply

    grid.nodes[999].fault = join
    run = Run(serve(grid, settings_for(config, tmp_path, wait=0.3)))
    took_part = [record["took_part"] for record in run.history]
    assert took_part[0] == ["client-0000", "client-0001"]
    assert took_part[-1] == ["client-0000", "client-0001", "client-0002"]
    clients = [[int(name[-4:]) for name in names] for names in took_part]
    assert_same(run.state("last").server, engine_rounds(config, clients))


def test_a_site_that_restarts_is_asked_again_and_loses_only_the_round_it_restarted_in(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=3)
    grid = simulated()

    def restart(message, reply):
        if is_train(message) and message.metadata.group_id == "1":
            grid.nodes[998].since = "2"
            return None
        return reply

    grid.nodes[998].fault = restart
    run = Run(serve(grid, settings_for(config, tmp_path)))
    assert run.history[0]["left_out"] == {"client-0002": "it was restarted"}
    assert run.history[-1]["left_out"] == {}
    assert grid.nodes[998].asked.count("query") == 2
    clients = [[int(name[-4:]) for name in record["took_part"]] for record in run.history]
    assert_same(run.state("last").server, engine_rounds(config, clients))


def test_ten_sites_all_train_from_the_first_round_however_late_they_come(tmp_path, monkeypatch):
    config = tiny(method__name="fedavg", train__rounds=1, partition__clients=10, partition__min_samples=2)
    grid = simulated(10)
    late = {number: grid.nodes.pop(number) for number in (995, 994, 991)}
    looks = []

    def look(self, honest=roster.Roster.look):
        looks.append(1)
        if len(looks) == 3:
            grid.nodes.update(late)
        honest(self)

    monkeypatch.setattr(roster.Roster, "look", look)
    run = Run(serve(grid, settings_for(config, tmp_path, wait=30.0)))
    assert len(run.history[0]["took_part"]) == 10
    assert_same(run.state("last").server, engine_rounds(config, [range(10)]))


def test_what_an_error_says_stays_at_the_site(tmp_path):
    config = tiny(method__name="fedavg", train__rounds=1)
    grid = simulated()
    grid.nodes[1000].config = {"site": str(tmp_path / "secret-patient/site.toml")}
    run = Run(serve(grid, settings_for(config, tmp_path, wait=0.5)))
    answers = [reply.error.reason for _, reply in grid.sent if reply.has_error()]
    assert answers
    assert all("FedncaError" in answer and "secret" not in answer for answer in answers)
    assert run.history[0]["left_out"] == {"client-0000": "it is not connected"}


def test_only_what_the_method_declares_leaves_a_site(tmp_path):
    run = Run(serve(grid := simulated(), settings_for(tiny(method__name="scaffold", train__rounds=1), tmp_path)))
    leaves = {
        message.metadata.message_type: {part: set(record) for part, record in reply.content.items()}
        for message, reply in grid.sent
    }
    arrays = {"layout", "float32", "int64"}
    assert leaves == {
        "query": {"site": {"name", "classes", "train", "val", "test"}},
        "train": {
            "weights": arrays,
            "extra": {"layout", "float32"},
            "counts": {"samples", "steps", "state_lost"},
            "losses": {"bce"},
        },
        "evaluate": {"histograms": {"layout", "int64"}},
    }
    sent = next(reply.content for message, reply in grid.sent if is_train(message))
    model = run.model("last")
    assert from_arrays(sent["weights"]).keys() == model.state_dict().keys()
    assert from_arrays(sent["extra"]).keys() == dict(model.named_parameters()).keys()
    assert isinstance(sent, RecordDict)


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
        patch.setattr(fednca.flower.server, "save_checkpoint", save)
        with pytest.raises(Stop):
            serve(simulated(), settings)
    run = Run(serve(simulated(), settings, resume=True))
    assert run.results["val"]["round"] == best
    for which in ("best", "final", "last"):
        assert run.state(which).round == expected.state(which).round
        assert_same(run.state(which).server, expected.state(which).server)
    assert not list((tmp_path / "again/run").glob("next*"))
