"""Our engines, driven by the rounds of a run without its evaluation and files."""

import time

import torch

from fednca.base.tensors import check_finite
from fednca.engines.select import select_engine
from fednca.methods.contract import Server
from fednca.runs.rounds import shares
from peers.work import Outcome, Work


def run(work: Work, engine: str) -> Outcome:
    """Build the named engine and train with it."""
    config, method = work.config.replace({"engine": engine}), work.method
    trainable = {name: work.initial[name] for name, p in work.model.named_parameters() if p.requires_grad}
    server, clients = Server(work.initial, method.start_server(trainable)), {}
    judged = [] if work.test is None else [work.test]
    began = time.perf_counter()
    executor = select_engine(config, method, work.model, work.shards, judged, work.device)
    try:
        for number in work.rounds:
            results = []
            for result in executor.train(number, work.chosen(number), server, clients):
                check_finite(result, number)
                results.append(result)
            results.sort(key=lambda result: result.update.client)
            server = method.aggregate(server, [result.update for result in results], shares(config, results))
            check_finite(server.weights, f"round {number}, after aggregation")
            clients |= {result.update.client: result.state for result in results if result.state}
        if work.device.type == "cuda":
            torch.cuda.synchronize()
        return Outcome(time.perf_counter() - began, server.weights)
    finally:
        executor.close()
