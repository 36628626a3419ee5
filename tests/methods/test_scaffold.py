"""SCAFFOLD against trajectories and fixed points worked out by hand, and the identities of its controls."""

import pytest
import torch
from helpers import line_trainer, one_point, tiny
from parity import start
from torch import nn

from fednca.config import TrainConfig
from fednca.engines.eager import EagerEngine
from fednca.methods.contract import Rule, Server
from fednca.methods.scaffold import ControlVariates
from fednca.runs import train


def play(rule, points, rounds, *, steps, lr, optimizer="sgd"):
    """Yield (w, c, [c_k]) after each round; client k has the one point (x, y), a round is the list of its clients.

    A point makes a parabola of curvature a = x² and optimum b = y/x. All start from w = 0.
    """
    shards = [one_point(*point) for point in points]
    config = TrainConfig(optimizer=optimizer, lr=lr, weight_decay=0.0, local_epochs=steps)
    trainer = line_trainer(rule, config)
    weights = {"weight": torch.zeros(1, 1, dtype=torch.float64)}
    server, states = Server(weights, rule.start_server(weights, len(points))), {}
    for number, clients in enumerate(rounds, 1):
        received = rule.send(server)
        results = [trainer.update(number, k, shards[k], server.weights, received, states.get(k, {})) for k in clients]
        states |= {result.update.client: result.state for result in results}
        shares = [1 / len(results)] * len(results)
        server = rule.combine(server, [result.update for result in results], shares, len(points))
        controls = [float(states.get(k, {}).get("weight", 0)) for k in range(len(points))]
        yield float(server.weights["weight"]), float(server.state.get("weight", 0)), controls


def test_two_rounds_of_two_clients_by_hand():
    # Client A: a = 1, b = 4. Client B: a = ¼, b = -8. Two steps at lr ½, so steps·lr = 1.
    # Round 1, no controls yet. A: 0 → 2 → 3. B: 0 → -1 → -1.875.
    #   c_A = 0 - 3, c_B = 0 + 1.875; w = (3 - 1.875)/2 = 0.5625, c = (-3 + 1.875)/2 = -0.5625.
    # Round 2. A: c - c_A = 2.4375, so w ← w - ½(w - 4 + 2.4375) = w - ½(w - 1.5625): 0.5625 → 1.0625 → 1.3125.
    #   B: c - c_B = -2.4375, so w ← w - ½(¼(w + 8) - 2.4375) = w - ⅛(w - 1.75): 0.5625 → 0.7109375 → 0.8408203125.
    #   c_A = -3 + 0.5625 + (0.5625 - 1.3125) = -3.1875, c_B = 1.875 + 0.5625 + (0.5625 - 0.8408203125).
    first, second = play(ControlVariates(), [(1.0, 4.0), (0.5, -4.0)], [[0, 1], [0, 1]], steps=2, lr=0.5)
    assert first == (0.5625, -0.5625, [-3.0, 1.875])
    assert second == (1.07666015625, -0.51416015625, [-3.1875, 2.1591796875])  # sums of powers of two: exact


def test_it_reaches_the_joint_optimum_where_fedavg_does_not():
    # a = (1, 4), b = (6, -2). The sum of both parabolas is least at Σ a·b / Σ a = (6 - 8)/5 = -0.4. A FedAvg client
    # goes to b + ρ(w - b) with ρ = (1 - lr·a)^steps, so that FedAvg rests at Σ (1-ρ)·b / Σ (1-ρ).
    points, steps, lr = [(1.0, 6.0), (2.0, -4.0)], 10, 0.1
    rest = [1 - (1 - lr * a) ** steps for a in (1, 4)]
    resting_point = (6 * rest[0] - 2 * rest[1]) / sum(rest)
    assert resting_point - (-0.4) > 1
    rounds = [[0, 1]] * 100
    *_, (fedavg, _, _) = play(Rule(), points, rounds, steps=steps, lr=lr)
    *_, (scaffold, control, controls) = play(ControlVariates(), points, rounds, steps=steps, lr=lr)
    assert fedavg == pytest.approx(resting_point, abs=1e-9)
    assert scaffold == pytest.approx(-0.4, abs=1e-6)
    assert control == pytest.approx(0, abs=1e-6)
    assert controls == pytest.approx([-6.4, 6.4], abs=1e-5)  # the gradients a·(w - b) at the optimum


def test_under_adamw_the_control_is_applied_after_the_step():
    points, steps, lr = [(1.0, 4.0), (0.5, -4.0)], 3, 0.1
    *_, (w, c, controls) = play(ControlVariates(), points, [[0, 1]], steps=steps, lr=lr, optimizer="adamw")
    expected = []
    for (x, y), c_k in zip(points, controls, strict=True):
        weight = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        adamw = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0)
        for _ in range(steps):
            adamw.zero_grad()
            (0.5 * (weight * x - y) ** 2).backward()
            adamw.step()
            weight.data -= lr * (c - c_k)
        expected.append(weight.item())
    _, (w, _, _) = play(ControlVariates(), points, [[0, 1], [0, 1]], steps=steps, lr=lr, optimizer="adamw")
    assert w == pytest.approx(sum(expected) / 2, abs=1e-12)


@pytest.mark.parametrize("rounds", [[[0, 1, 2]] * 4, [[0], [0, 2], [2], [0, 2]], [[1], [0, 1], [1, 2], [0]]])
def test_the_servers_control_is_the_mean_over_all_clients_whoever_takes_part(rounds):
    points = [(1.0, 4.0), (0.5, -4.0), (1.5, 2.0)]
    seen = set()
    for clients, (_, control, controls) in zip(
        rounds, play(ControlVariates(), points, rounds, steps=3, lr=0.2), strict=True
    ):
        seen |= set(clients)
        assert control == pytest.approx(sum(controls) / 3, abs=1e-12)
        assert {k for k in range(3) if controls[k]} == seen


def test_the_mean_holds_in_a_run_with_sampled_clients(tmp_path):
    state = train(tiny(method__name="scaffold", train__participation=0.7), tmp_path / "run").state("last")
    for name, control in state.server.state.items():
        mean = sum(own[name].double() for own in state.clients.values()) / 3
        torch.testing.assert_close(control.double(), mean, rtol=1e-4, atol=1e-6)


def test_with_zero_controls_the_first_round_is_fedavg_to_the_last_bit():
    updates = []
    for name in ("fedavg", "scaffold"):
        place, server = start(tiny(method__name=name))
        updates.append([result.update.weights for result in EagerEngine(place).train(1, range(3), server, {})])
    torch.testing.assert_close(updates[1], updates[0], rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["batch", "frozen"])
def test_buffers_are_averaged_and_never_corrected(norm):
    place, first = start(tiny(method__name="scaffold", model__norm=norm))
    weights, trainable = first.weights, {name for name, _ in place.model.named_parameters()}
    before = Server(weights, {name: torch.ones_like(weights[name]) for name in trainable})
    updates = [result.update for result in EagerEngine(place).train(1, range(3), before, {})]
    server = place.method.rule.combine(before, updates, [1 / 3] * 3, 3)

    assert all(set(update.extra) == trainable for update in updates)
    assert set(server.state) == trainable
    assert sum(t.numel() for t in updates[0].extra.values()) == ControlVariates.copies * sum(
        p.numel() for p in place.model.parameters()
    )
    buffers = [name for name in weights if name not in trainable]
    assert buffers
    for name in buffers:
        each = torch.stack([update.weights[name] for update in updates]).double()
        expected = each.amax(0) if name.endswith("num_batches_tracked") else each.mean(0)
        torch.testing.assert_close(server.weights[name].double(), expected, rtol=1e-6, atol=1e-7)
        if norm == "frozen":
            assert torch.equal(server.weights[name], weights[name])
