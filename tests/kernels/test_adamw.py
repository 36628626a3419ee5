"""AdamW in one kernel against torch's, by triton's interpreter, and what is left to torch; on a GPU: tests/gpu."""

from types import SimpleNamespace

import pytest
import torch
from adamw_cases import OPTIONS, ROUNDS, Setting, assert_is_torchs, interpret, round_of
from helpers import tiny
from parity import distance_of_updates, play, start

from fednca.engines.graphs import one_kernel
from fednca.engines.graphs.engine import GraphEngine
from fednca.methods.contract import Server


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpret(tmp_path_factory.mktemp("interpreted") / "found.pt")


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_torchs_and_copies_are_the_weights(name, interpreted):
    assert_is_torchs(interpreted["steps", name], OPTIONS[name])


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_is_the_one_of_torchs_optimiser(name, interpreted):
    found = interpreted["round", name]
    before, after, used = round_of(name)
    assert used == 0
    assert (found["used"] > 0) == ROUNDS[name]
    assert distance_of_updates(Server(found["weights"]), after, before) < 1e-3


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedprox", "fedcurv", "centralized"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_forward_pass_finds_the_weights_of_its_moment(name, optimizer, monkeypatch):
    config = tiny(method__name=name, train__precision="bf16", train__optimizer=optimizer)
    place, server = start(config)
    engine, looks = GraphEngine(place, 1), []
    slot = engine.slots[0][0]
    learner = type(place.method.learner)
    losses = learner.losses

    def look(*given):
        looks.append(torch.equal(slot.shadow, slot.optimizer.vector.bfloat16()))
        return losses(*given)

    monkeypatch.setattr(learner, "losses", look)
    play(engine, server, 2)
    assert len(looks) > 4
    assert all(looks)


# -- what is left to torch ---------------------------------------------------------------------------------------------


def planned(monkeypatch, copies=True, here=True, can=True, broken=False, **options):
    """Return what would move some weights if the kernel could be compiled here."""
    setting = Setting.build(options)

    def warm_up(weights, device):
        if broken:
            raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(one_kernel, "available", lambda: can)
        patch.setattr(one_kernel, "DEVICE", "cpu" if here else "cuda")
        patch.setattr("fednca.kernels.adamw.warm_up", warm_up)
        return one_kernel.in_one_kernel(setting.optimizer, setting.copies.vectors[torch.bfloat16] if copies else None)


def test_adamw_without_clipping_is_the_kernels(monkeypatch):
    assert isinstance(planned(monkeypatch), one_kernel.OneKernel)


@pytest.mark.parametrize(
    "changes",
    [
        {"copies": False},
        {"here": False},
        {"can": False},
        {"broken": True},
        {"train__optimizer": "sgd"},
        {"train__clip_norm": 0.1},
    ],
    ids=str,
)
def test_all_else_is_torchs(changes, monkeypatch):
    assert planned(monkeypatch, **changes) is None


def test_weights_in_float64_are_torchs(monkeypatch):
    monkeypatch.setattr(one_kernel, "available", lambda: True)
    monkeypatch.setattr(one_kernel, "DEVICE", "cpu")
    optimizer = Setting.build({}).optimizer
    changed = SimpleNamespace(**vars(optimizer) | {"vector": optimizer.vector.double()})
    assert one_kernel.in_one_kernel(changed, torch.zeros(1, dtype=torch.bfloat16)) is None


# -- which gradients are read where they are ---------------------------------------------------------------------------

PLACE = torch.zeros(4, 3, 5, 8).to(memory_format=torch.channels_last)
SHIFTED = torch.zeros(PLACE.numel() + 1)[1:].view(4, 5, 8, 3).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_lies_like_its_weight_is_read_where_it_is(dtype):
    gradient = torch.ones_like(PLACE, dtype=dtype)
    assert one_kernel.at_hand(gradient, PLACE) is gradient


def test_strides_of_single_rows_do_not_matter():
    place = torch.zeros(16, 24, 1, 1).to(memory_format=torch.channels_last)
    gradient = torch.ones(16, 24, 1, 1)
    assert gradient.stride() == (24, 1, 1, 1) != place.stride()
    assert one_kernel.at_hand(gradient, place) is gradient


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(4, 3, 5, 8),
        torch.randn(4, 1, 5, 8).expand(4, 3, 5, 8),
        torch.randn(4, 3, 5, 16).to(memory_format=torch.channels_last)[..., ::2],
        torch.randn(4, 3, 5, 8).to(memory_format=torch.channels_last).half(),
        torch.randn(4, 3, 5, 8).to(memory_format=torch.channels_last).double(),
        SHIFTED.fill_(2),
    ],
    ids=["planes", "expanded", "every second", "half", "double", "misaligned"],
)
def test_any_other_gradient_is_copied_to_its_place(gradient):
    place = torch.full_like(PLACE, 3.0)
    assert one_kernel.at_hand(gradient, place) is place
    torch.testing.assert_close(place, gradient.float(), rtol=0, atol=0)


def test_a_missing_gradient_stays_missing():
    assert one_kernel.at_hand(None, PLACE) is None
