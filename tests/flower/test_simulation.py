"""The same app on Flower's own simulation: clients are workers of Ray, and the weights are the engine's."""

import pytest
from helpers import tiny
from in_process import assert_same, engine_rounds
from processes import Federation, wait_until

from fednca.flower.app import write_app
from fednca.runs import Run

NODES = ("--federation-config", "num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.0")


@pytest.fixture
def federation(tmp_path):
    running = Federation(tmp_path)
    yield running
    running.stop()
    wait_until(lambda: not running.relatives(), "the end of all processes")


def test_clients_of_a_simulation_train_to_the_weights_of_the_engine(federation, tmp_path):
    config = tiny(method__name="scaffold", train__rounds=2)
    (tmp_path / "run.toml").write_text(config.to_toml())
    (tmp_path / "server.toml").write_text('config = "run.toml"\nout = "run"\nmin_sites = 3\n')
    federation.start_simulation()
    run = federation.run(write_app(tmp_path / "app"), *NODES, server=str(tmp_path / "server.toml"), resume=False)
    wait_until(lambda: (tmp_path / "run/results.json").exists(), "the end of the run")
    wait_until(lambda: federation.status(run) == "finished:completed", "the run's good status")

    found = Run(tmp_path / "run")
    names = ["client-0000", "client-0001", "client-0002"]
    assert [record["took_part"] for record in found.history] == [names, names]
    assert [record["notes"] for record in found.history] == [{}, {}]  # nobody has lost the state between the rounds
    assert_same(found.state("last").server, engine_rounds(config, [range(3), range(3)]))
