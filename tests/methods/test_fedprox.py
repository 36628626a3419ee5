"""FedProx against closed forms, and its two limits."""

import pytest
import torch
from helpers import LeastSquares, line_trainer, local_of, one_point, tiny
from torch import nn

from fednca.config import TrainConfig
from fednca.methods.fedprox import Proximal
from fednca.runs import train


def test_one_client_follows_the_closed_form():
    # One point x = 2, y = 6 and f(w) = ½(2w - 6)² has curvature a = 4 and optimum b = 3. From w0 = 1 the gradient
    # step on f + μ/2·(w - w0)² is w ← w - lr·[a(w - b) + μ(w - w0)]: it shrinks the distance to
    # w̄ = (a·b + μ·w0)/(a + μ) by 1 - lr·(a + μ) each time. With μ = 1: w̄ = 13/5, and 1 - 0.1·5 = ½ per step.
    start = {"weight": torch.ones(1, 1, dtype=torch.float64)}
    for steps in range(1, 6):
        config = TrainConfig(optimizer="sgd", lr=0.1, weight_decay=0.0, local_epochs=steps)
        result = line_trainer(Proximal(mu=1.0), config).update(1, 0, one_point(2.0, 6.0), start, {}, {})
        assert float(result.update.weights["weight"]) == pytest.approx(2.6 + 0.5**steps * (1 - 2.6), abs=1e-12)


def test_the_term_is_half_mu_times_the_squared_distance_of_the_trainable_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    model[1].bias.requires_grad_(False)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(3)  # all: weights, the frozen bias, running statistics, the counter
    term = Proximal(mu=0.5).penalties(local_of(model, LeastSquares(), start=start))["prox"]
    # 4 + 2 weights of the linear layer and 2 scales of the normalisation have each moved by 3: 0.5/2·8·9 = 18
    assert float(term.detach()) == pytest.approx(18)
    (2 * term).backward()
    assert model[1].bias.grad is None
    torch.testing.assert_close(model[0].weight.grad, torch.full((2, 2), 3.0, dtype=torch.float64))  # 2·μ·(w - w0)


def test_without_mu_it_is_fedavg_to_the_last_bit_and_with_mu_it_stays_nearer(tmp_path):
    def weights(name, **options):
        config = tiny(method__name=name, method__options=options, train__rounds=2)
        run = train(config, tmp_path / f"{name}{options}")
        return run.state("last").server.weights, run.history[-1]["losses"]

    fedavg, _ = weights("fedavg")
    free, terms = weights("fedprox", mu=0.0)
    torch.testing.assert_close(free, fedavg, rtol=0, atol=0)
    assert set(terms) == {"bce"}

    _, loose = weights("fedprox", mu=1e-6)
    _, tight = weights("fedprox", mu=10.0)
    assert tight["prox"] / 10.0 < loose["prox"] / 1e-6  # half the squared distance, mean over the steps
