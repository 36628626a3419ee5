"""The reference engine against plain PyTorch loops, and the identities of federated averaging."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from parity import start

from fednca.base.randomness import torch_rng
from fednca.engines.eager import EagerEngine
from fednca.engines.local import Workplace
from fednca.engines.model import build_model
from fednca.methods.contract import Server, Tensors, average
from fednca.runs.rounds import choose_clients


def one_round(place: Workplace, server: Server, clients, number=1) -> list[Tensors]:
    return [result.update.weights for result in EagerEngine(place).train(number, clients, server, {})]


def assert_same(found: Tensors, expected: Tensors, **tolerance) -> None:
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} | tolerance))


@pytest.mark.parametrize("method", ["fedavg", "fednca-ml"])
def test_one_client_is_plain_training_with_the_optimiser_reset_each_epoch(method):
    # with both regularisers off, FedNCA-ML is the LADM + ETF row of the ablation: BCE alone
    options = {"lambda1": 0.0, "lambda2": 0.0} if method == "fednca-ml" else {}
    config = tiny(
        partition__clients=1,
        partition__gamma=1.0,
        method__name=method,
        method__options=options,
        train__precision="float64",
    )
    place, server = start(config)
    model = build_model(config, place.method, tuple("0123456789"), pretrained="none")
    model.train()
    for number in (1, 2, 3):
        (weights,) = one_round(place, server, [0], number)
        server = Server(average([weights], [1.0]))

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for images, labels in place.train[0].batches(32, torch_rng(0, "batches", number, 0)):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(images).logits, labels).backward()
            optimizer.step()
        assert_same(server.weights, dict(model.state_dict()), atol=1e-9)


def test_equal_clients_with_one_full_batch_sgd_step_are_centralised_gradient_descent():
    config = tiny(
        method__name="fedavg",
        model__norm="group",
        train__optimizer="sgd",
        train__lr=0.1,
        train__weight_decay=0.0,
        train__batch_size=4096,
        train__precision="float64",
    )
    place, server = start(config)
    size = min(map(len, place.train))
    for k, shard in enumerate(place.train):  # the identity needs clients of one size
        place.train[k] = type(shard)(shard.store, shard.rows[:size], shard.labels[:size])
    averaged = average(one_round(place, server, range(3)), [1 / 3] * 3)

    model = build_model(config, place.method, tuple("0123456789"), pretrained="none")
    images = torch.cat([shard.store.gather(shard.rows) for shard in place.train])
    labels = torch.cat([shard.labels for shard in place.train])
    F.binary_cross_entropy_with_logits(model(images).logits, labels).backward()
    descended = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters()}
    assert_same({name: averaged[name] for name in descended}, descended, atol=1e-12)


def test_neither_the_order_nor_the_number_of_clients_matters():
    place, server = start(tiny(method__name="fednca-ml"))
    forward = one_round(place, server, [0, 1, 2])
    backward = one_round(place, server, [2, 1, 0])[::-1]
    alone = one_round(place, server, [1])[0]
    for one, other in zip(forward, backward, strict=True):
        assert_same(one, other)
    assert_same(alone, forward[1])


def test_another_round_is_another_order_of_batches():
    place, server = start(tiny())
    (first,), (second,) = one_round(place, server, [0], 1), one_round(place, server, [0], 2)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_buffers_are_averaged_and_counters_stay_integers():
    place, server = start(tiny(method__name="fedavg"))
    updates = one_round(place, server, range(3))
    averaged = average(updates, [0.2, 0.3, 0.5])
    for name, tensor in averaged.items():
        each = [update[name] for update in updates]
        if name.endswith("num_batches_tracked"):
            assert tensor.dtype == torch.int64
            assert tensor == max(each)
        else:
            expected = 0.2 * each[0].double() + 0.3 * each[1].double() + 0.5 * each[2].double()
            torch.testing.assert_close(tensor, expected.float(), rtol=1e-6, atol=1e-7)
    assert len({int(t) for name, t in averaged.items() if name.endswith("num_batches_tracked")}) == 1


def test_equal_weights_stay_equal_under_averaging():
    weights = {"w": torch.randn(1000)}
    assert_same(average([weights] * 10, [0.1] * 10), weights)


def test_gradients_are_clipped_to_the_norm():
    plain = {"train__optimizer": "sgd", "train__lr": 1.0, "train__weight_decay": 0.0, "train__batch_size": 4096}
    place, server = start(tiny(method__name="fedavg", model__norm="group", train__clip_norm=1e-3, **plain))
    (weights,) = one_round(place, server, [0])
    moved = torch.cat([(weights[name] - server.weights[name]).flatten() for name in weights])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)  # one step of SGD at lr 1 moves by the gradient


def test_bf16_stays_near_float32():
    place, server = start(tiny(train__optimizer="sgd", train__lr=0.01))
    low, _ = start(tiny(train__optimizer="sgd", train__lr=0.01, train__precision="bf16"))
    exact, rough = one_round(place, server, [0])[0], one_round(low, server, [0])[0]
    name = "head.ladm.attention.out_proj.weight"
    assert rough[name].dtype == torch.float32
    moved, error = exact[name] - server.weights[name], rough[name] - exact[name]
    assert 0 < float(error.norm() / moved.norm()) < 0.1


def test_sampled_clients_are_a_function_of_seed_and_round():
    config = tiny(train__participation=0.3)
    rounds = [choose_clients(config, 10, number) for number in range(1, 200)]
    assert rounds == [choose_clients(config, 10, number) for number in range(1, 200)]
    assert all(len(set(chosen)) == 3 and chosen == sorted(chosen) for chosen in rounds)
    counts = torch.bincount(torch.tensor(rounds).flatten(), minlength=10)
    assert counts.min() > 35  # 59.7 expected each; below 35 has a chance under 1e-4
    assert choose_clients(tiny(train__participation=0.01), 10, 1) != []
    assert choose_clients(tiny(), 10, 1) == list(range(10))


def test_frozen_normalisation_never_changes():
    place, server = start(tiny(model__norm="frozen"))
    averaged = average(one_round(place, server, range(3)), [1 / 3] * 3)
    buffers = [name for name, _ in place.model.named_buffers() if name in averaged]
    assert buffers
    assert_same({n: averaged[n] for n in buffers}, {n: server.weights[n] for n in buffers})
