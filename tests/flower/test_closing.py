"""A closing of two exchanges with sites: what each is asked, and what the server makes of their sums."""

import closing_cases
import numpy as np
from helpers import pooled_features, tiny
from in_process import settings_for, simulated

from fednca.flower.engine import CLOSE
from fednca.flower.records import from_arrays
from fednca.flower.server import serve
from fednca.flower.uploads import what_leaves
from fednca.runs import Run, train


def exchanges(grid):
    """Return the messages of the closing with their answers, in the order in which they were sent."""
    return [(message, reply) for message, reply in grid.sent if message.metadata.message_type == CLOSE]


def test_a_second_exchange_asks_with_what_came_of_the_first(tmp_path):
    grid, config = simulated(), tiny(method__name=closing_cases.NAME, train__rounds=1)
    run = Run(serve(grid, settings_for(config, tmp_path)))
    simulation = train(config, tmp_path / "simulation")
    features, _ = pooled_features(simulation)

    asked = [from_arrays(message.content.array_records["asked"]) for message, _ in exchanges(grid)]
    assert [set(each) for each in asked] == [set()] * 3 + [{"mean"}] * 3
    for each in asked[3:]:
        np.testing.assert_allclose(each["mean"], features.mean(axis=0), rtol=1e-5)
    sent = [set(from_arrays(reply.content.array_records["sums"])) for _, reply in exchanges(grid)]
    assert sent == [{"images", "features"}] * 3 + [{"squares"}] * 3

    closing_cases.assert_standardized(run.state("final").server.weights, run.state("last").server.weights, features)


def test_what_leaves_a_site_includes_every_exchange():
    sums = [each for each in what_leaves(tiny(method__name=closing_cases.NAME), 10) if "closing" in each.what]
    assert [each.what.rpartition(": ")[2] for each in sums] == ["images, features", "squares"]
    assert [each.numbers for each in sums] == [8 * 65, 8 * 64]
    plain = what_leaves(tiny(method__name="fedavg"), 10)
    assert not any("closing" in each.what for each in plain)
