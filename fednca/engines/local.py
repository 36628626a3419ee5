"""What the engines of a simulation share: they hold the images of all clients themselves."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fednca.base.tensors import check_finite
from fednca.config import Config
from fednca.engines.contract import Engine, Judgement, Totals
from fednca.engines.images import Shard
from fednca.measures.collapse import measure_collapse
from fednca.measures.metrics import at_thresholds, multilabel_metrics
from fednca.measures.thresholds import pick_thresholds, score_histograms
from fednca.methods.contract import Method, Server, Tensors


@dataclass(frozen=True)
class Workplace:
    """What an engine of a simulation works with; it stays the same in all rounds."""

    config: Config
    method: Method
    model: nn.Module
    train: list[Shard]  # one per client
    val: Shard  # the clients' validation shares, one after the other
    val_sizes: list[int]
    test: Shard
    device: torch.device


class LocalEngine(Engine):
    """Judges models and adds up sums on a workplace's images; a subclass trains."""

    def __init__(self, place: Workplace) -> None:
        """Take the workplace."""
        self.place, self.note = place, ""
        self.names = [str(client) for client in range(len(place.train))]

    @abstractmethod
    def predict(self, weights: Tensors, shard: Shard, batch_size: int) -> Tensor:
        """Return the probabilities (N, C) that a model with these weights gives for a shard's images, in order."""

    @abstractmethod
    def client_sums(self, weights: Tensors, shards: Sequence[Shard], batch_size: int, asked: Tensors) -> list[Tensors]:
        """Return each client's sums for one exchange of the closing, for a model with these weights."""

    def sums(self, number: int, server: Server, asked: Tensors) -> Totals:
        """Add up the sums of all clients."""
        found = self.client_sums(server.weights, self.place.train, self.place.config.evaluate.batch_size, asked)
        return Totals(total(found))

    def judge(self, number: int, server: Server) -> Judgement:
        """Score validation and test images, and measure at 0.5 and at calibrated thresholds."""
        config, shards = self.place.config, {"val": self.place.val, "test": self.place.test}
        size = config.evaluate.batch_size
        scores = {name: self.predict(server.weights, shard, size) for name, shard in shards.items()}
        check_finite({"scores": torch.cat(list(scores.values()))}, f"round {number}, evaluation")
        metrics = {name: multilabel_metrics(scores[name], shard.labels) for name, shard in shards.items()}
        thresholds = choose_thresholds(self.place, scores["val"])
        calibrated = {
            name: at_thresholds(metrics[name], scores[name], shard.labels, thresholds) for name, shard in shards.items()
        }
        found = {name: own.as_dict() for name, own in metrics.items()}
        found["calibrated"] = {"thresholds": thresholds.tolist()} | {n: own.as_dict() for n, own in calibrated.items()}
        if config.evaluate.collapse:
            self.place.model.load_state_dict(server.weights)
            found["collapse"] = measure_collapse(self.place.model.eval(), shards["val"].batches(size))
        return Judgement(found, thresholds)


def choose_thresholds(place: Workplace, val: Tensor) -> Tensor:
    """Return thresholds (C,) from the clients' histograms of their own parts of the validation scores."""
    config = place.config.calibrate
    sizes = place.val_sizes if config.min_count > 1 else [len(val)]  # else one histogram for all gives the same
    parts = torch.split(val, sizes), torch.split(place.val.labels, sizes)
    sent = [score_histograms(probabilities, labels, config) for probabilities, labels in zip(*parts, strict=True)]
    return pick_thresholds(torch.stack(sent).sum(0), config)


def total(sums: Sequence[Tensors]) -> Tensors:
    """Return the total of clients' sums by name."""
    return {name: torch.stack([each[name] for each in sums]).sum(dim=0) for name in sums[0]}
