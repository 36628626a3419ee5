"""What leaves a site and how many bytes it is, measured on the records that a site would send for blank images."""

from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from fednca.base.devices import cpu_threads
from fednca.base.errors import FedncaError
from fednca.config import Config
from fednca.engines.model import build_model
from fednca.flower.checks import blank_shard, rehearse, rehearse_closing
from fednca.flower.records import count_bytes, to_arrays
from fednca.measures.thresholds import score_histograms
from fednca.methods import create_method
from fednca.methods.contract import Method, Server, Tensors


@dataclass(frozen=True)
class Sent:
    """One thing that a site sends: when, what, the bytes of its numbers and the bytes of the whole record.

    What has no sizes is a few numbers or words.
    """

    when: str
    what: str
    numbers: int | None = None
    record: int | None = None


def what_leaves(config: Config, classes: int) -> list[Sent]:
    """Return everything that a site sends in a run, with the sizes that the real model's records have."""
    method = create_method(config)
    if method.rule.centralized:
        raise FedncaError("method 'centralized' has no federation, so nothing leaves a site; choose another method")
    names = tuple(f"class {number}" for number in range(classes))
    with cpu_threads(config.threads):
        method = replace(method, learner=method.learner.sketch())
        model = build_model(config, method, names, pretrained="none")
        result = rehearse(config, method, model, classes)
        exchanges = closing_sums(config, method, model, classes)
    every = config.evaluate.every
    judged = "every round" if every == 1 else f"every {every} rounds, and the last"
    update, shard = result.update, blank_shard(config, classes)
    histograms = dict.fromkeys(("val", "test"), score_histograms(shard.labels[:0], shard.labels[:0], config.calibrate))
    extra = f"the method's extra tensors ({method.about.state})"
    withheld = f"; counts below {config.calibrate.min_count} withheld" if config.calibrate.min_count else ""
    bins = f"histograms of each class's scores on val and test images ({config.calibrate.bins} bins{withheld})"
    return [
        Sent("at the start", "name of the site, its classes, its numbers of train, val and test images"),
        measured("every round", "weights and buffers of the model after local training", update.weights),
        *([measured("every round", extra, update.extra)] if update.extra else []),
        Sent("every round", "counts: images, local steps, whether the site has lost what the method keeps there"),
        Sent("every round", f"mean of each term of the local loss: {', '.join(result.losses)}"),
        *(measured(judged, f"sums for the method's closing step: {', '.join(sums)}", sums) for sums in exchanges),
        measured(judged, bins, histograms),
        Sent("after an error", "its kind, not its text"),
    ]


def closing_sums(config: Config, method: Method, model: nn.Module, classes: int) -> list[Tensors]:
    """Return what a site sends in each exchange of the closing, where all there is are blank images."""
    found: list[Tensors] = []
    if method.closing is not None:
        exchanges = method.closing.close(Server(model.state_dict()))
        asked = next(exchanges)
        with suppress(StopIteration):
            while True:
                found.append(rehearse_closing(config, method, model, classes, asked))
                asked = exchanges.send(found[-1])
    return found


def measured(when: str, what: str, tensors: Tensors) -> Sent:
    """Describe tensors that are sent: the bytes of their numbers, and of the record with its headers and layout."""
    record = to_arrays(tensors)
    return Sent(when, what, count_bytes(tensors), sum(len(array.data) for array in record.values()))
