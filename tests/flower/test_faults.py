"""Rounds go on without the sites that fail; the model is then what the engine makes of the others' updates."""

import io
import threading

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from helpers import Stop, tiny
from in_process import Node, assert_same, engine_rounds, is_train, settings_for, simulated

import fednca.flower.server
from fednca.base.errors import FedncaError, RunFailedError
from fednca.flower import exchange, roster
from fednca.flower.assignment import ASSIGNMENT, Assignment
from fednca.flower.records import from_arrays, to_arrays
from fednca.flower.server import serve
from fednca.runs import Run


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


def test_a_run_does_not_start_with_too_few_sites(tmp_path):
    settings = settings_for(tiny(), tmp_path, wait=0.3, min_sites=3)
    with pytest.raises(RunFailedError, match=r"2 of at least 3 sites .*client-0002: it is not connected"):
        serve(simulated(2), settings)
    assert not (tmp_path / "run/last.safetensors").exists()


def test_the_log_says_which_sites_a_start_waits_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fednca.flower.server, "TELL", 0.1)
    monkeypatch.setattr(fednca.flower.server.LOG.parent, "propagate", True)
    with caplog.at_level("INFO", logger="flwr.fednca"):
        serve(simulated(2), settings_for(tiny(train__rounds=1), tmp_path, wait=0.4))
    told = [record.getMessage() for record in caplog.records]
    assert told.index("waiting up to 0.3 s more for client-0002") < told.index(
        "site 'client-0002' is missing at the start: it is not connected"
    )


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


def looking():
    """Return the threads that look for answers."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("answers")]


def wait_until_none_looks():
    for thread in looking():
        thread.join(5.0)
    assert looking() == []


def test_nobody_looks_for_answers_after_a_run_that_could_not_begin(tmp_path, monkeypatch):
    grid = simulated()
    grid.nodes[999].fault = lambda message, reply: None  # it never says who it is

    def refuse(*_):
        raise FedncaError("agree on one name")

    monkeypatch.setattr(fednca.flower.server, "join_classes", refuse)
    with pytest.raises(FedncaError, match="agree on one name"):
        serve(grid, settings_for(tiny(), tmp_path, wait=0.3))
    wait_until_none_looks()


def test_nobody_looks_for_answers_after_an_exchange_that_failed():
    grid = simulated(2)
    question = RecordDict({ASSIGNMENT: Assignment(config=tiny(), run="0" * 16).to_record()})
    messages = {str(node): Message(question, node, "query") for node in grid.nodes}
    grid.nodes[999].fault = lambda message, reply: None

    def read(site, content):
        raise Stop

    with pytest.raises(Stop):
        exchange.exchange(grid, messages, 60.0, read)
    wait_until_none_looks()
