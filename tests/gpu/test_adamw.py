"""AdamW in one kernel on a GPU against torch's: alone, captured, and in the rounds of clients."""

import pytest
import torch
from adamw_cases import OPTIONS, STEPS, UNEQUAL, assert_is_torchs, gradients, prepare, with_kernel
from helpers import tiny
from parity import assert_agree, distance_of_updates, play, start

from fednca.engines.eager import EagerEngine
from fednca.engines.graphs import lanes, one_kernel
from fednca.engines.graphs.engine import GraphEngine
from fednca.engines.graphs.lanes import Lane
from fednca.kernels import adamw

pytestmark = pytest.mark.gpu
RESNET = {"model__backbone": "resnet18", "data__image_size": 64}


def graphs(place, slots=4):
    return GraphEngine(place, slots)


def kernels(engine):
    return [slot.one_kernel for slot, _ in engine.slots]


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_torchs_and_repeat_themselves(name):
    found = with_kernel(OPTIONS[name], "cuda")
    assert_is_torchs(found, OPTIONS[name])
    torch.testing.assert_close(with_kernel(OPTIONS[name], "cuda"), found, rtol=0, atol=0)


@pytest.mark.parametrize("block", [1024, 8192])
def test_steps_do_not_depend_on_how_weights_are_cut(block, monkeypatch):
    monkeypatch.setattr(adamw, "BLOCK", block)
    assert_is_torchs(with_kernel(OPTIONS["the usual"], "cuda"), OPTIONS["the usual"])


@pytest.mark.parametrize("name", OPTIONS)
def test_captured_steps_need_no_compiler_and_replay_right(name, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    setting, kernel = prepare(OPTIONS[name], device)
    adamw.warm_up(len(kernel.places), device)
    torch.cuda.synchronize()
    for each in (adamw._begin_step, adamw._move):
        monkeypatch.setattr(each, "compile", None)  # whoever calls it fails
    static = {key: tensor.clone() for key, tensor in gradients(0, device).items()}
    lane = Lane(device)
    lane.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lane.stream):
        for step in range(STEPS):
            given = gradients(step, device)
            for key, tensor in given.items():
                if tensor is not None:
                    static[key].copy_(tensor)
            missing = {key for key, tensor in given.items() if tensor is None}

            def work(missing=missing):
                # new tensors, where autograd's would be, and another place in memory for each graph
                kernel.step([None if key in missing else tensor * 1 for key, tensor in static.items()])

            lane.do(bool(missing), work)
    torch.cuda.synchronize()
    assert len(lane.graphs) == 2
    assert_is_torchs(setting.vectors(), OPTIONS[name])
    lane.close()


@pytest.mark.parametrize("changes", [{}, RESNET], ids=["demo", "resnet18"])
@pytest.mark.parametrize("name", ["fedavg", "fednca-ml", "scaffold", "fedprox", "centralized"])
def test_rounds_are_those_of_torchs_optimiser(name, changes, monkeypatch):
    place, server = start(tiny(**UNEQUAL, **changes, device="cuda", method__name=name), "cuda")
    # from fresh weights, AdamW would turn gradients that are nothing but rounding into whole steps
    before = play(EagerEngine(place), server, 3)
    engine = graphs(place)
    has_kernel = not engine.slots[0][0].optimizer.clip_norm
    assert all((kernel is not None) == has_kernel for kernel in kernels(engine))
    found = play(engine, before.server, 1, before.states, first=4)
    monkeypatch.setattr(one_kernel, "available", lambda: False)
    engine = graphs(place)
    assert kernels(engine) == [None] * len(engine.slots)
    expected = play(engine, before.server, 1, before.states, first=4)
    distance = distance_of_updates(found.server, expected.server, before.server)
    assert distance < 5e-2  # 0.022 where most steps are taken


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedprox"])
def test_copies_are_the_weights_after_a_round(name):
    place, server = start(tiny(**UNEQUAL, device="cuda", method__name=name), "cuda")
    engine = graphs(place)
    play(engine, server, 2)
    torch.cuda.synchronize()
    for slot, _ in engine.slots:
        assert torch.equal(slot.shadow, slot.optimizer.vector.bfloat16())
        assert not torch.equal(slot.values.vectors[torch.float32], engine.common.start.vectors[torch.float32])


def test_batches_of_several_sizes_share_a_slot():
    place, server = start(tiny(**UNEQUAL, device="cuda"), "cuda")
    alone, together = graphs(place, 1), graphs(place, 4)
    found, expected = (play(engine, server, 2) for engine in (alone, together))
    assert len(alone.slots[0][1].graphs) > 1
    assert_agree(found, expected, atol=0.0)


def test_graphs_that_go_and_come_again_read_their_own_gradients(monkeypatch):
    place, server = start(tiny(**UNEQUAL, device="cuda"), "cuda")
    expected = play(graphs(place, 1), server, 4)
    for module in (lanes, one_kernel):
        monkeypatch.setattr(module, "GRAPHS_KEPT", 1)
    engine = graphs(place, 1)
    assert_agree(play(engine, server, 4), expected, atol=0.0)
    assert len(engine.slots[0][1].graphs) == 1
