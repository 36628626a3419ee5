"""Checks of what a site sent: an answer that cannot be what was asked for is left out, with the reason."""

import copy
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict
from torch import Tensor, nn

from fednca.base.errors import FedncaError
from fednca.base.tensors import dtype_name
from fednca.config import Config
from fednca.engines.contract import Trained
from fednca.engines.images import Shard
from fednca.engines.local_update import Trainer
from fednca.engines.workplace import build_store
from fednca.flower.records import from_arrays
from fednca.methods.contract import Method, Server, Tensors, Update
from fednca.runs.training import first_state


def rehearse(config: Config, method: Method, model: nn.Module, classes: int) -> Trained:
    """Train on two blank images as a site would, to know the names, shapes and dtypes of a site's update."""
    model = copy.deepcopy(model)
    server = first_state(method, model, config.partition.clients).server
    trainer = Trainer(method, model, config.train.model_copy(update={"local_epochs": 1}), config.seed)
    return trainer.update(1, 0, blank_shard(config, classes), server.weights, method.rule.send(server), {})


def rehearse_closing(config: Config, method: Method, model: nn.Module, classes: int, asked: Tensors) -> Tensors:
    """Add up over two blank images as a site would in an exchange of the closing that sends `asked`."""
    trainer = Trainer(method, copy.deepcopy(model), config.train, config.seed)
    return trainer.sums(model.state_dict(), blank_shard(config, classes), config.evaluate.batch_size, asked)


def blank_shard(config: Config, classes: int) -> Shard:
    """Return two black images that show no class."""
    size = config.data.image_size
    store = build_store(config, np.zeros((2, size, size, 3), np.uint8), torch.device("cpu"))
    return Shard.build(store, np.arange(2), np.zeros((2, classes), np.int8))


def read_update(content: RecordDict, client: int, expected: Trained) -> Trained:
    """Read a site's update from its answer; FedncaError says what is wrong with it."""
    weights = read_tensors(content, "weights", expected.update.weights)
    extra = read_tensors(content, "extra", expected.update.extra)
    for part in ("counts", "losses"):
        if part not in content.metric_records:
            raise FedncaError(f"its answer has no '{part}'")
    counts, losses = (content.metric_records[part] for part in ("counts", "losses"))
    if set(losses) != set(expected.losses):
        raise FedncaError(f"its losses are {', '.join(losses) or 'none'}")
    update = Update(client, weights, extra, read_count(counts, "samples"), read_count(counts, "steps"))
    return Trained(update, {}, {term: read_number(losses, term) for term in losses})


def read_tensors(content: RecordDict, part: str, expected: Tensors) -> Tensors:
    """Read tensors from an answer; they must be finite and have the names, shapes and dtypes of the expected ones."""
    if part not in content.array_records:
        raise FedncaError(f"its answer has no '{part}'")
    tensors = from_arrays(content.array_records[part])
    odd = sorted(tensors.keys() ^ expected.keys())
    if odd:
        raise FedncaError(f"its '{part}' {'have' if odd[0] in tensors else 'lack'} '{odd[0]}'")
    for name, tensor in tensors.items():
        wanted = expected[name]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise FedncaError(f"its '{name}' is {_describe(tensor)}, not {_describe(wanted)}")
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not math.isfinite(norm(floats.values())):  # one norm is fast to check, but may overflow where no number does
        for name, tensor in floats.items():
            if not bool(torch.isfinite(tensor).all()):
                raise FedncaError(f"its '{name}' is not finite")
    return tensors


def read_number(record: MetricRecord, name: str) -> float:
    """Return a finite number of a record."""
    value = record.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise FedncaError(f"its '{name}' is {value}")
    return float(value)


def read_count(record: MetricRecord, name: str) -> int:
    """Return a whole number above zero of a record."""
    value = record.get(name)
    if not isinstance(value, int) or value < 1:
        raise FedncaError(f"its '{name}' is {value}")
    return value


def largest_norm(weights: Tensors, bound: float, noise: float = 0.0) -> float:
    """Return the largest norm that a change of these weights may have.

    bound: this norm as a multiple of the weights' own. noise: standard deviation of what a site adds to each number.
    """
    floats = [tensor for tensor in weights.values() if tensor.is_floating_point()]
    return bound * max(1.0, norm(floats)) + 2 * noise * math.sqrt(sum(tensor.numel() for tensor in floats))


def check_norm(update: Update, server: Server, largest: float, lr: float) -> None:
    """Refuse an update if its change or its extra tensors are implausibly large.

    Extra tensors may be mean steps divided by the learning rate, as SCAFFOLD's are; so their bound is larger by 1 / lr.
    """
    names = [name for name, tensor in server.weights.items() if tensor.is_floating_point()]
    change = math.hypot(*(float(torch.dist(update.weights[name], server.weights[name])) for name in names))
    extra = norm(update.extra.values())
    if not change <= largest:
        raise FedncaError(f"its change of the weights has norm {change:.3g}, where at most {largest:.3g} is plausible")
    if not extra <= largest / lr:
        raise FedncaError(f"its extra tensors have norm {extra:.3g}, where at most {largest / lr:.3g} is plausible")


def read_histograms(content: RecordDict, shape: tuple[int, int, int], images: Mapping[str, int]) -> Tensors:
    """Read score histograms (2, C, bins + 1) from an answer; they must not count more images than the site has."""
    found = read_tensors(content, "histograms", dict.fromkeys(("val", "test"), torch.empty(shape, dtype=torch.int64)))
    for part, counts in found.items():
        most = images[part]
        if bool((counts < 0).any()) or bool((counts > most).any()) or bool((counts.sum((0, 2)) > most).any()):
            raise FedncaError(f"its histograms for {part} do not count {most} images")
    return found


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


def _describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
