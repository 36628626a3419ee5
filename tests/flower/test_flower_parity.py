"""The same federation, seeds and method through the engine and through Flower's messages: the same weights."""

import pytest
import torch
from helpers import tiny
from in_process import simulated

from fednca.engines.optimizer import VectorOptimizer
from fednca.flower.config import ServerConfig
from fednca.flower.server import serve
from fednca.methods import find_method, method_names
from fednca.runs import Run, train

FEDERATED = [name for name in method_names() if not find_method(name).rule.centralized]


def settings_for(config, folder, **changes):
    (folder / "run.toml").write_text(config.to_toml())
    return ServerConfig(config=str(folder / "run.toml"), out=str(folder / "flower"), wait=5.0, **changes)


@pytest.mark.parametrize("name", FEDERATED)
def test_every_method_gives_the_same_weights_as_the_engine(name, tmp_path):
    config = tiny(method__name=name, train__participation=0.7, train__weighting="samples")
    expected = train(config, tmp_path / "engine")
    found = Run(serve(simulated(), settings_for(config, tmp_path)))

    mine, reference = (run.state("last").server for run in (found, expected))
    assert {n: t.dtype for n, t in mine.weights.items()} == {n: t.dtype for n, t in reference.weights.items()}
    torch.testing.assert_close(mine.weights, reference.weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.state, reference.state, rtol=0, atol=1e-6)
    for mine, reference in zip(found.history, expected.history, strict=True):
        assert mine["clients"] == reference["clients"]
        assert mine["left_out"] == {}


def test_a_process_that_plays_many_clients_makes_one_optimiser(tmp_path, monkeypatch):
    made = []

    def make(*arguments):
        made.append(VectorOptimizer(*arguments))
        return made[-1]

    monkeypatch.setattr("fednca.engines.local_update.VectorOptimizer", make)
    serve(simulated(), settings_for(tiny(method__name="fedavg", train__rounds=2, seed=7), tmp_path))
    assert len(made) == 2  # the clients' and the server's, which rehearses what they will send
