"""Our engines, driven by the rounds of a run without its evaluation and files."""

import time

import torch

from fednca.base.tensors import check_finite
from fednca.engines.contract import LeftOut
from fednca.engines.select import select_engine
from fednca.methods.contract import Server, Tensors
from fednca.runs.rounds import check_update, shares
from peers.work import Outcome, Work


def run(work: Work, engine: str) -> Outcome:
    """Build an engine by name and let it train."""
    rule, place = work.method.rule, work.place(engine)
    trainable = {name: work.initial[name] for name, p in work.model.named_parameters() if p.requires_grad}
    server, states = Server(work.initial, rule.start_server(trainable, len(work.shards))), dict[int, Tensors]()
    began = time.perf_counter()
    executor = select_engine(place)
    try:
        for number in work.rounds:
            trained = []
            for answer in executor.train(number, work.chosen(number), server, states):
                assert not isinstance(answer, LeftOut)  # a simulation leaves nobody out
                check_update(answer, number)
                trained.append(answer)
            trained.sort(key=lambda each: each.update.client)
            updates = [each.update for each in trained]
            server = rule.combine(server, updates, shares(place.config, trained), len(work.shards))
            check_finite(server.weights, f"round {number}, after aggregation")
            states |= {each.update.client: each.state for each in trained if each.state}
        if work.device.type == "cuda":
            torch.cuda.synchronize()
        return Outcome(time.perf_counter() - began, server.weights)
    finally:
        executor.close()
