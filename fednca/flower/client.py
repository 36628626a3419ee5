"""A site's side: it announces itself, trains, adds up and judges, and sends only what the method declares."""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from fednca.base.devices import cpu_threads, pick_device
from fednca.base.errors import FedncaError
from fednca.config import build_config
from fednca.engines.images import Shard
from fednca.engines.local_update import Trainer
from fednca.engines.model import build_model
from fednca.flower.assignment import Assignment
from fednca.flower.privacy import privatize_update
from fednca.flower.records import from_arrays, to_arrays
from fednca.flower.site import Site, open_site
from fednca.flower.state import load_state, save_state, unchanged
from fednca.measures.thresholds import score_histograms
from fednca.methods import create_method
from fednca.methods.contract import Tensors
from fednca.models.heads import load_constants

LOG = logging.getLogger("flwr.fednca")
FAILED = 1000  # our error code in Flower's replies

Handler = Callable[[Message, Context], Message]


def guarded(handler: Handler) -> Handler:
    """Tell the server only an error's kind: its text may name paths or patients, and stays in the site's own log."""

    @functools.wraps(handler)
    def answer(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except Exception as error:  # of any kind, since Flower would send its text
            LOG.error("this site could not answer: %s", error, exc_info=not isinstance(error, FedncaError))
            reason = f"it could not do its part ({type(error).__name__}); its own log says why"
            return Message(Error(FAILED, reason), reply_to=message)

    return answer


@guarded
def announce(message: Message, context: Context) -> Message:
    """Send the site's name, its classes and its numbers of images."""
    site = open_site(context, Assignment.from_message(message.content))
    counts = {part: len(own.rows) for part, own in site.parts.items()}
    record = ConfigRecord({"name": site.name, "classes": list(site.classes), **counts})
    return Message(RecordDict({"site": record}), reply_to=message)


@guarded
def train(message: Message, context: Context) -> Message:
    """Train the global model on the site's images and send the update."""
    with at_work(message, context) as work:
        told, start = work.assignment, work.tensors("weights")
        kept = load_state(work.site.state, told.accepted)
        result = work.trainer.update(
            told.round, told.client, work.shard("train"), start, work.tensors("received"), work.put(kept or {})
        )
        save_state(work.site.state, told.round, told.accepted, result.state)
        trainable = [name for name, weight in work.trainer.model.named_parameters() if weight.requires_grad]
        update = result.update
        content = RecordDict()
        content["weights"] = to_arrays(privatize_update(told.privacy, start, update.weights, trainable))
        content["extra"] = to_arrays(update.extra)
        lost = int(kept is None and bool(result.state))
        content["counts"] = MetricRecord({"samples": update.samples, "steps": update.steps, "state_lost": lost})
        content["losses"] = MetricRecord(dict(result.losses))
    return Message(content, reply_to=message)


@guarded
def evaluate(message: Message, context: Context) -> Message:
    """Judge a model on the site's validation and test images and send histograms of its scores."""
    with at_work(message, context) as work:
        weights, config = work.tensors("weights"), work.site.config
        histograms = {}
        for part in ("val", "test"):
            shard = work.shard(part)
            scores = shard.labels[:0]
            if len(shard):
                scores = work.trainer.predict(weights, shard, config.evaluate.batch_size)
            histograms[part] = score_histograms(scores, shard.labels, config.calibrate)
    return Message(RecordDict({"histograms": to_arrays(histograms)}), reply_to=message)


@guarded
def close(message: Message, context: Context) -> Message:
    """Send the site's sums for an exchange of the method's closing."""
    with at_work(message, context) as work:
        size = work.site.config.evaluate.batch_size
        sums = work.trainer.sums(work.tensors("weights"), work.shard("train"), size, work.tensors("asked"))
    return Message(RecordDict({"sums": to_arrays(sums)}), reply_to=message)


@dataclass(frozen=True)
class Work:
    """An assignment and all that is needed to carry it out."""

    assignment: Assignment
    site: Site
    trainer: Trainer
    device: torch.device
    content: RecordDict

    def tensors(self, part: str) -> Tensors:
        """Return tensors that the server sent, on the device."""
        return self.put(from_arrays(self.content.array_records[part]))

    def put(self, tensors: Tensors) -> Tensors:
        """Move tensors to the device."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def shard(self, part: str) -> Shard:
        """Return the site's images of one part, with labels in the federation's classes."""
        return self.site.shard(part, self.assignment.classes, self.device)


@contextmanager
def at_work(message: Message, context: Context) -> Iterator[Work]:
    """Yield a trainer with the server's method and model, on the site's device; refuse data that have changed."""
    told = Assignment.from_message(message.content)
    site = open_site(context, told)
    device = pick_device(site.config.device)
    torch.backends.cudnn.deterministic = True  # a repeated round gives the same weights
    with unchanged(site.state, site.data), cpu_threads(site.config.threads):
        trainer = _build(site.config.model_dump_json(), told.classes, device)
        work = Work(told, site, trainer, device, message.content)
        load_constants(trainer.model, work.tensors("constants"))
        yield work


@functools.lru_cache(maxsize=1)  # a simulation's worker plays many clients, and each overwrites all of it
def _build(config: str, classes: tuple[str, ...], device: torch.device) -> Trainer:
    wanted = build_config(json.loads(config))
    method = create_method(wanted)
    method = replace(method, learner=method.learner.sketch())  # the server read the files, and sends what is in them
    model = build_model(wanted, method, classes, pretrained="none").to(device)
    return Trainer(method, model, wanted.train, wanted.seed)
