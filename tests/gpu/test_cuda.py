"""The eager engine on a CUDA device against itself on the CPU."""

import pytest
import torch
from helpers import Stop, StopAfter, tiny

from fednca.methods import method_names
from fednca.runs import resume, train

pytestmark = pytest.mark.gpu


def moved(run):
    """Return the first round's update, in float64, without the attention's key bias, whose true gradient is zero."""
    return {name: tensor for name, tensor in run.state("last").server.weights.items() if "in_proj_bias" not in name}


@pytest.mark.parametrize("name", method_names())
def test_one_round_in_float64_agrees_with_the_cpu(name, tmp_path):
    options = {"dropout": 0.0} if name == "fedlgt" else {}  # a device draws its own dropout
    config = tiny(method__name=name, method__options=options, train__rounds=1, train__precision="float64")
    here = train(config, tmp_path / "cpu")
    there = train(config.replace({"device": "cuda"}), tmp_path / "cuda")
    torch.testing.assert_close(moved(there), moved(here), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", method_names())
def test_bf16_learns_and_resumes(name, tmp_path):
    config = tiny(method__name=name, device="cuda", train__precision="bf16", train__rounds=10)
    run = train(config, tmp_path / "run")
    losses = [sum(record["losses"].values()) for record in run.history]
    assert losses[-1] < losses[0]
    (tmp_path / "run/results.json").unlink()
    assert resume(tmp_path / "run").finished


def test_images_that_do_not_fit_come_from_the_host_and_change_nothing(tmp_path, monkeypatch):
    config = tiny(
        device="cuda", train__precision="float64", train__rounds=1, train__augment={"hflip": True, "rotate": 9.0}
    )
    resident = train(config, tmp_path / "resident")
    monkeypatch.setattr("fednca.engines.images.room", lambda device: 0)
    streamed = train(config, tmp_path / "streamed")
    torch.testing.assert_close(moved(streamed), moved(resident), rtol=0, atol=1e-12)
    on_cpu = train(config.replace({"device": "cpu"}), tmp_path / "cpu")
    torch.testing.assert_close(moved(streamed), moved(on_cpu), rtol=0, atol=1e-8)


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize("engine", ["eager", "graphs"])
@pytest.mark.parametrize("name", ["scaffold", "fedcurv", "centralized"])  # whose clients have a state
def test_a_run_that_is_stopped_in_the_middle_ends_as_if_it_had_not_been(name, engine, share, tmp_path):
    config = tiny(method__name=name, device="cuda", engine=engine, train__participation=share, train__rounds=4)
    whole = train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "stopped", [StopAfter(2)])
    resumed = resume(tmp_path / "stopped")
    weights = (dict(run.state("last").server.weights) for run in (resumed, whole))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)  # a step without the state is a hundred times that
