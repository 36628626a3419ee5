"""FedAdam and FedYogi against a NumPy recursion, FedAvgM against torch's SGD, and what they leave alone."""

import numpy as np
import pytest
import torch
from torch import nn

from fednca.methods.contract import Rule, Server, Update
from fednca.methods.fedadam import ServerAdam
from fednca.methods.fedavgm import ServerMomentum
from fednca.methods.fedyogi import ServerYogi

OPTIONS = {"server_lr": 0.3, "beta1": 0.7, "beta2": 0.8, "tau": 0.05}


def _reference_numpy(kind, start, averages):
    """Algorithm 2 of the paper, one entry after the other; returns w, m and v after the last round."""
    w, m, v = start.copy(), np.zeros_like(start), np.full_like(start, 0.05**2)
    for average in averages:
        for i in range(len(w)):
            delta = average[i] - w[i]
            m[i] = 0.7 * m[i] + 0.3 * delta
            if kind is ServerAdam:
                v[i] = 0.8 * v[i] + 0.2 * delta**2
            elif v[i] > delta**2:
                v[i] = v[i] - 0.2 * delta**2
            else:
                v[i] = v[i] + 0.2 * delta**2
            w[i] = w[i] + 0.3 * m[i] / (v[i] ** 0.5 + 0.05)
    return w, m, v


def update(client, **weights):
    return Update(client, weights, {}, samples=1, steps=1)


@pytest.mark.parametrize("kind", [ServerAdam, ServerYogi])
def test_six_rounds_follow_the_recursion(kind):
    rng = np.random.default_rng(0)
    scales = np.array([3.0, 1.0, 0.1, 0.01, 0.0])  # above and below τ, and a weight that no client moves
    start = rng.standard_normal(5)
    rule = kind(**OPTIONS)
    weights = {"w": torch.from_numpy(start.copy())}
    server = Server(weights, rule.start_server(weights, 2))
    averages = []
    for _ in range(6):
        now = server.weights["w"].numpy()
        one, two = (now + scales * rng.standard_normal(5) for _ in range(2))
        averages.append(0.25 * one + 0.75 * two)
        updates = [update(0, w=torch.from_numpy(one)), update(1, w=torch.from_numpy(two))]
        server = rule.combine(server, updates, [0.25, 0.75], 2)
    w, m, v = _reference_numpy(kind, start, averages)
    np.testing.assert_allclose(server.weights["w"], w, rtol=1e-12)
    np.testing.assert_allclose(server.state["m/w"], m, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(server.state["v/w"], v, rtol=1e-12)


def test_adam_and_yogi_differ_in_the_second_moment_only_where_changes_shrink():
    # τ² = 1, β2 = ¾. Δ = 3: both go up, Adam to ¾ + 9/4 = 3, Yogi to 1 + 9/4. Then Δ = 1: Adam decays to ¾·3 + ¼,
    # Yogi subtracts ¼ whatever the distance.
    moments = []
    for kind in (ServerAdam, ServerYogi):
        rule = kind(server_lr=1e-9, beta2=0.75, tau=1.0)
        server = Server({"w": torch.zeros(1)}, rule.start_server({"w": torch.zeros(1)}, 1))
        for delta in (3.0, 1.0):
            server = rule.combine(server, [update(0, w=torch.full((1,), delta))], [1.0], 1)
            moments.append(float(server.state["v/w"]))
    assert moments == pytest.approx([3.0, 2.5, 3.25, 3.0])


@pytest.mark.parametrize("kind", [ServerAdam, ServerYogi])
def test_all_but_the_trainable_weights_are_averaged(kind):
    model = nn.BatchNorm1d(2)
    model.bias.requires_grad_(False)
    rule = kind()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    server = Server(start, rule.start_server({"weight": start["weight"]}, 2))
    updates = [update(k, **{name: tensor + k + 1 for name, tensor in start.items()}) for k in range(2)]
    after = rule.combine(server, updates, [0.5, 0.5], 2)
    for name in ("bias", "running_mean", "running_var"):
        torch.testing.assert_close(after.weights[name], start[name] + 1.5)
    assert after.weights["num_batches_tracked"] == 2
    assert after.weights["num_batches_tracked"].dtype == torch.int64
    assert not torch.allclose(after.weights["weight"], start["weight"] + 1.5)
    assert set(after.state) == set(server.state) == {"m/weight", "v/weight"}
    assert torch.equal(server.state["m/weight"], torch.zeros(2))  # the old server is left as it was


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("server_lr", [0.5, 1.0, 1.5])
def test_six_rounds_of_fedavgm_are_those_of_torchs_sgd(server_lr, momentum):
    rng = torch.Generator().manual_seed(0)
    rule = ServerMomentum(server_lr=server_lr, momentum=momentum)
    weights = {"w": torch.randn(5, generator=rng, dtype=torch.float64)}
    reference = nn.Parameter(weights["w"].clone())
    sgd = torch.optim.SGD([reference], lr=server_lr, momentum=momentum)
    server = Server(weights, rule.start_server(weights, 2))
    for _ in range(6):
        changes = [torch.randn(5, generator=rng, dtype=torch.float64) for _ in range(2)]
        updates = [update(k, w=server.weights["w"] + change) for k, change in enumerate(changes)]
        server = rule.combine(server, updates, [0.25, 0.75], 2)
        reference.grad = -(0.25 * changes[0] + 0.75 * changes[1])
        sgd.step()
        torch.testing.assert_close(server.weights["w"], reference.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("server_lr", "part"), [(0.5, 0.5), (1.0, 1.0), (1.5, 1.0)])
def test_fedavgm_moves_buffers_without_momentum_and_never_beyond_their_average(server_lr, part):
    rule = ServerMomentum(server_lr=server_lr, momentum=0.9)
    model = nn.BatchNorm1d(2)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    server = Server(start, rule.start_server({"weight": start["weight"], "bias": start["bias"]}, 1))
    expected = start["running_var"]
    for _ in range(3):
        now = server.weights
        server = rule.combine(server, [update(0, **{name: tensor + 3 for name, tensor in now.items()})], [1.0], 1)
        expected = expected + part * 3
        torch.testing.assert_close(server.weights["running_var"], expected)
    assert server.weights["num_batches_tracked"] == 9
    assert set(server.state) == {"m/weight", "m/bias"}


def test_fedavgm_without_momentum_at_a_rate_of_one_is_fedavg():
    rng = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(7, generator=rng, dtype=torch.float64), "running_mean": torch.zeros(2)}
    updates = [update(k, **{n: t + torch.randn(t.shape, generator=rng) for n, t in start.items()}) for k in range(3)]
    rule = ServerMomentum(server_lr=1.0, momentum=0.0)
    ours = rule.combine(Server(start, rule.start_server({"w": start["w"]}, 3)), updates, [0.5, 0.25, 0.25], 3)
    plain = Rule().combine(Server(start, {}), updates, [0.5, 0.25, 0.25], 3)
    torch.testing.assert_close(dict(ours.weights), dict(plain.weights), rtol=1e-12, atol=1e-14)
