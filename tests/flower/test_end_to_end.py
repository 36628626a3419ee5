"""Three real sites on loopback: TLS, node keys, a node that dies, a poisoned update, a server that is killed."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from folders import join_sites, write_sites
from helpers import tiny
from in_process import assert_same, engine_rounds
from processes import Federation, wait_until, write_node_key

from fednca.flower.app import write_app
from fednca.runs import Run

DIGITS = [f"digit {digit}" for digit in range(10)]
KNOWN = {"north": DIGITS[:7], "east": DIGITS[3:], "south": DIGITS[::2]}
FAULTS = {"east 1": "poison", "south 2": "hang"}
SERVER = """
config = "run.toml"
out = "run"
sites = ["north", "east", "south"]
wait = 600.0
deadline = 600.0
"""


@pytest.fixture
def federation(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", json.dumps(FAULTS))
    running = Federation(tmp_path)
    yield running
    running.stop()
    wait_until(lambda: not running.relatives(), "the end of all processes")


def write_faulty_app(folder: Path) -> Path:
    """Write our app with the ClientApp that the environment can spoil."""
    app = write_app(folder)
    shutil.copy(Path(__file__).with_name("faulty_app.py"), app)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("fednca.flower.app:client", "faulty_app:client"))
    return app


def test_three_sites_train_through_a_dead_node_a_poisoned_update_and_a_killed_server(federation, tmp_path):
    config = tiny(method__name="scaffold", train__rounds=3, evaluate__every=3)
    (tmp_path / "run.toml").write_text(config.to_toml())
    (tmp_path / "server.toml").write_text(SERVER)
    app, settings = write_faulty_app(tmp_path / "app"), str(tmp_path / "server.toml")
    federation.start_superlink()
    sites = write_sites(tmp_path / "sites", KNOWN, images=48)
    with ThreadPoolExecutor() as pool:
        submitted = pool.submit(federation.run, app, server=settings, resume=False)  # it waits for all sites
        for site, _ in zip(sites, pool.map(federation.register, sites), strict=True):
            federation.start_supernode(site, sites[site], mortal=site == "south")
        submitted.result()

    # Round 1 has a poisoned update; in round 2 a node dies while it trains.
    wait_until(lambda: (sites["south"].parent / "hangs").exists(), "the second round")
    federation.kill("south")

    # While the SuperLink has not noticed it: a node that nobody has registered is turned away.
    write_node_key(tmp_path / "stranger.key")
    stranger = federation.start_supernode("stranger", sites["south"])
    assert wait_until(lambda: stranger.poll() is not None, "the stranger's end")
    assert stranger.returncode != 0
    assert "Failed to initialize the connection to the SuperLink" in federation.log("stranger")
    together = join_sites(sites, DIGITS, tmp_path / "all")
    natural = {"data.name": "folder", "data.root": str(together), "partition.kind": "natural"}
    expected = engine_rounds(config.replace(natural), [[1, 2], [0, 1], [0, 1, 2]])

    history = tmp_path / "run/history.jsonl"
    wait_until(lambda: len(history.read_text().splitlines()) == 2, "the end of the second round")

    # The server dies in round 3 and comes back; the dead node does, too, once the SuperLink knows that it was gone.
    federation.kill("superlink")
    before = history.read_text().splitlines()[:2]
    federation.start_superlink()

    def back():
        node = federation.start_supernode("south", sites["south"])
        wait_until(lambda: "SuperNode ID" in federation.log("south") or node.poll() is not None, "an answer")
        return node.poll() is None

    with ThreadPoolExecutor() as pool:
        submitted = pool.submit(federation.run, app, server=settings, resume=True)
        wait_until(back, "the dead node's return")
        run = submitted.result()
    wait_until(lambda: (tmp_path / "run/results.json").exists(), "the end of the run")
    wait_until(lambda: federation.status(run) == "finished:completed", "the run's good status")

    found = Run(tmp_path / "run")
    assert history.read_text().splitlines()[:2] == before
    assert [record["round"] for record in found.history] == [1, 2, 3]
    assert [(record["took_part"], record["left_out"]) for record in found.history] == [
        (["north", "south"], {"east": "its 'head.linear.weight' is not finite"}),
        (["east", "north"], {"south": "it went offline"}),
        (["east", "north", "south"], {}),
    ]
    assert all(record["notes"] == {} for record in found.history)
    assert set(found.results["val"]["by_site"]) == set(sites)
    assert_same(found.state("last").server, expected)
