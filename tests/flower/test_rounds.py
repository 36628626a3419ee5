"""Rounds that few sites judge, that are as good as one before, or whose average is no number."""

import pytest
import torch
from helpers import tiny
from in_process import assert_same, settings_for, simulated

from fednca.base.errors import RunFailedError
from fednca.flower.engine import CLOSE
from fednca.flower.server import serve
from fednca.methods.contract import Rule
from fednca.methods.spherefed import ClosedForm
from fednca.runs import Run
from fednca.runs.checkpoint import load_checkpoint

SITES = [f"client-{number:04d}" for number in range(3)]


def withhold(grid, kind, sites):
    """Let the last so many sites give no answer of a kind in round 1."""
    for number in (998, 999, 1000)[:sites]:
        grid.nodes[number].fault = lambda message, reply: (
            None if (message.metadata.message_type, message.metadata.group_id) == (kind, "1") else reply
        )


@pytest.mark.parametrize("kind", [CLOSE, "evaluate"])
@pytest.mark.parametrize("silent", [1, 2])
def test_a_model_is_judged_by_as_many_sites_as_make_a_round_and_not_by_fewer(kind, silent, tmp_path):
    config = tiny(method__name="spherefed", train__rounds=2)
    grid, settings = simulated(), settings_for(config, tmp_path, min_sites=2, deadline=1.0)
    withhold(grid, kind, silent)
    first, second = Run(serve(grid, settings)).history
    assert first["not_judged_by"] == dict.fromkeys(SITES[3 - silent :], "it did not answer within 1 s")
    assert list(first.get("by_site", {})) == (SITES[:2] if silent == 1 else [])
    assert ("val" in first) == (silent == 1)
    assert list(second["by_site"]) == SITES
    asked = {number: node.asked.count("evaluate") for number, node in grid.nodes.items()}
    assert asked == {
        1000 - client: 1 if kind == CLOSE and (silent == 2 or client == 2) else 2  # there was nothing for it to judge
        for client in range(3)
    }


def test_all_exchanges_of_a_closing_are_with_the_sites_that_answered_the_first(tmp_path, monkeypatch):
    def twice(self, server, honest=ClosedForm.close):
        yield {}
        return (yield from honest(self, server))

    monkeypatch.setattr(ClosedForm, "close", twice)
    grid = simulated()
    silent = [998]  # for one message

    def hold_back(message, reply):
        return None if message.metadata.message_type == CLOSE and silent and silent.pop() else reply

    grid.nodes[998].fault = hold_back
    run = Run(serve(grid, settings_for(tiny(method__name="spherefed", train__rounds=1), tmp_path, deadline=1.0)))
    assert list(run.history[0]["not_judged_by"]) == SITES[2:]
    assert list(run.history[0]["by_site"]) == SITES[:2]
    assert [grid.nodes[number].asked.count(CLOSE) for number in (1000, 999, 998)] == [2, 2, 1]


def test_of_rounds_that_are_equally_good_the_last_one_is_the_model_to_use(tmp_path):
    grid, first = simulated(), {}

    def repeat(message, reply):  # the scores of round 1
        if message.metadata.message_type == "evaluate":
            sent = first.setdefault(message.metadata.dst_node_id, reply.content["histograms"])
            reply.content["histograms"] = sent
        return reply

    for node in grid.nodes.values():
        node.fault = repeat
    run = Run(serve(grid, settings_for(tiny(method__name="fedavg"), tmp_path)))
    assert run.results["val"]["round"] == run.results["paper"]["round"] == run.state("final").round == 3
    assert_same(run.state("final").server, run.state("last").server)


def test_an_average_that_is_no_number_ends_the_run_and_the_last_good_round_stays(tmp_path, monkeypatch):
    def spoil(self, *given, honest=Rule.combine):
        after = honest(self, *given)
        if len(rounds := [*spoiled, 1]) == 2:
            after.weights["head.linear.weight"][0, 0] = torch.nan
        spoiled[:] = rounds
        return after

    spoiled = []
    monkeypatch.setattr(Rule, "combine", spoil)
    settings = settings_for(tiny(method__name="fedavg"), tmp_path)
    with pytest.raises(RunFailedError, match=r"round 2, after aggregation: 'head\.linear\.weight' is not finite"):
        serve(simulated(), settings)
    assert [record["round"] for record in Run(settings.out).history] == [1]
    kept = load_checkpoint(tmp_path / "run/last.safetensors")
    assert kept.round == 1
    assert all(bool(weight.isfinite().all()) for weight in kept.server.weights.values())
