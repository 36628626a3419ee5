"""The loop that one would write without a federated learning library."""

import time

import torch

from fednca.base.errors import FedncaError
from fednca.methods.contract import Tensors
from peers.work import Outcome, Work, copy_of, train_locally


def run(work: Work) -> Outcome:
    """Train the clients one after another and average them."""
    if work.config.train.weighting != "equal":
        raise FedncaError("the plain loop averages clients equally; use --set train.weighting=equal")
    weights, model = work.initial, work.model
    began = time.perf_counter()
    for number in work.rounds:
        trained = []
        for client in work.chosen(number):
            model.load_state_dict(weights)
            train_locally(model, work.method, work.shards[client], work.config, number, client)
            trained.append(copy_of(model))
        weights = mean(trained)
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    return Outcome(time.perf_counter() - began, weights)


def mean(trained: list[Tensors]) -> Tensors:
    """Average tensors of the same name in float64; counters keep the last client's value."""
    averaged = dict(trained[-1])
    for name, tensor in averaged.items():
        if tensor.is_floating_point():
            total = torch.zeros_like(tensor, dtype=torch.float64)
            for each in trained:
                total.add_(each[name], alpha=1 / len(trained))
            averaged[name] = total.to(tensor.dtype)
    return averaged
