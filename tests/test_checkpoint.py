import json

import pytest
import torch
from safetensors.torch import save_file

import fednca.runs.checkpoint
from fednca.base.errors import FedncaError
from fednca.methods.contract import Server
from fednca.runs.checkpoint import State, keep_checkpoint, load_checkpoint, load_last, save_checkpoint
from fednca.runs.history import Best


def example() -> State:
    weights = {"layer.weight": torch.randn(3, 2), "bn.num_batches_tracked": torch.tensor(7)}
    server = Server(weights, {"momentum/layer.weight": torch.randn(3, 2)})
    return State(
        5, server, {0: {"c": torch.zeros(2)}, 11: {"c": torch.ones(2), "d/e": torch.tensor(3.0)}}, Best(4, 0.25)
    )


def test_round_trip(tmp_path):
    state, path = example(), tmp_path / "last.safetensors"
    save_checkpoint(path, state)
    found = load_checkpoint(path)
    assert (found.round, found.best) == (5, Best(4, 0.25))
    assert found.clients.keys() == state.clients.keys()
    torch.testing.assert_close(found.server.weights, state.server.weights, rtol=0, atol=0)
    torch.testing.assert_close(found.server.state, state.server.state, rtol=0, atol=0)
    torch.testing.assert_close(found.clients, state.clients, rtol=0, atol=0)
    assert found.server.weights["bn.num_batches_tracked"].dtype == torch.int64
    assert json.loads(path.with_suffix(".json").read_text())["round"] == 5


def test_tensors_that_share_memory_are_both_kept(tmp_path):
    same = torch.randn(4)
    state = State(1, Server({"w": same}, {"w": same, "empty": torch.zeros(0)}), {2: {"w": same}})
    save_checkpoint(tmp_path / "last.safetensors", state)
    found = load_checkpoint(tmp_path / "last.safetensors")
    for tensor in (found.server.weights["w"], found.server.state["w"], found.clients[2]["w"]):
        assert torch.equal(tensor, same)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_byte_anywhere_is_noticed(tmp_path, where):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, example())
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(FedncaError, match="corrupted"):
        load_checkpoint(path)


@pytest.mark.parametrize("size", [0, 5, 200])
def test_a_cut_file_is_noticed(tmp_path, size):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, example())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FedncaError, match="corrupted"):
        load_checkpoint(path)


@pytest.mark.parametrize(("killed_in", "expected"), [("last", 1), ("_take_best", 2)])
def test_a_kill_leaves_the_best_model_that_the_last_checkpoint_knows(tmp_path, monkeypatch, killed_in, expected):
    def rounds(number):
        server = Server({"w": torch.tensor(float(number))})
        return [State(number, server, best=Best(number, 0.5)) for _ in range(2)]

    def save(path, state):
        if path.stem == killed_in:
            raise KeyboardInterrupt
        save_checkpoint(path, state)

    def take(folder, *, known):
        raise KeyboardInterrupt

    keep_checkpoint(tmp_path, *rounds(1))
    with monkeypatch.context() as patch:
        patch.setattr(fednca.runs.checkpoint, "save_checkpoint", save)
        if killed_in == "_take_best":
            patch.setattr(fednca.runs.checkpoint, "_take_best", take)
        with pytest.raises(KeyboardInterrupt):
            keep_checkpoint(tmp_path, *rounds(2))
    found = load_last(tmp_path)
    best = load_checkpoint(tmp_path / "best.safetensors")
    assert (found.round, found.best.round, best.round, best.server.weights["w"]) == (expected,) * 4
    assert not list(tmp_path.glob("next.*"))


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(FedncaError, match="not a checkpoint of fednca"):
        load_checkpoint(tmp_path / "x.safetensors")


def test_no_file(tmp_path):
    with pytest.raises(FedncaError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "last.safetensors")
