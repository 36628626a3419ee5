"""Choosing the engine that executes a run."""

import multiprocessing
import platform
from collections.abc import Callable
from typing import cast

import torch

from fednca.base.errors import FedncaError, UnfitEngineError, unknown_name
from fednca.base.plugins import check_call, find_plugin, plugin_names
from fednca.base.randomness import GLOBAL
from fednca.data.processes import cores
from fednca.data.store import StoredImages
from fednca.engines.contract import Engine
from fednca.engines.eager import EagerEngine
from fednca.engines.graphs.engine import GraphEngine
from fednca.engines.local import Workplace
from fednca.engines.processes import ProcessEngine, forks_can_train

AUTO, EAGER = "auto", "eager"


def select_engine(place: Workplace) -> Engine:
    """Build the configured engine; `auto` takes the fastest one that can do the run, and notes why if that is slow."""
    wanted = place.config.engine
    if wanted == EAGER:
        return EagerEngine(place)
    if wanted == AUTO:
        wanted = "graphs" if place.device.type == "cuda" else "processes"
    builders = {"graphs": build_graphs, "processes": build_processes}
    if (outside := find_plugin("engines", wanted)) is not None:
        return build_outside(wanted, outside, place)
    if wanted not in builders:
        raise unknown_name("engine", wanted, [AUTO, EAGER, *builders, *plugin_names("engines")])
    try:
        return builders[wanted](place)
    except UnfitEngineError as reason:
        if place.config.engine != AUTO:
            raise FedncaError(f"engine '{wanted}' cannot be used: {reason}; leave `engine` out") from None
        eager = EagerEngine(place)
        eager.note = f"engine: eager, since {reason}" if place.device.type == "cuda" else ""
        return eager


def build_outside(name: str, build: Callable[[Workplace], Engine], place: Workplace) -> Engine:
    """Build an engine of another package; refuse one that lacks something."""
    check_call(f"engine '{name}'", build, "place")
    lacking: list[str] = sorted(getattr(build, "__abstractmethods__", ()))
    engine = None if lacking else build(place)
    members = ("names", "note", "keeps_states", "train", "sums", "judge", "ended", "facts", "close")
    if lacking := lacking or [each for each in members if not hasattr(engine, each)]:
        raise FedncaError(f"engine '{name}' has no {', '.join(lacking)}; make it a fednca.engines.Engine with all that")
    return cast(Engine, engine)


def build_graphs(place: Workplace) -> Engine:
    """Build the engine of CUDA graphs."""
    if place.device.type != "cuda":
        raise UnfitEngineError("CUDA graphs need a CUDA device")
    if any(isinstance(shard.store.pixels, StoredImages) for shard in [*place.train, place.val, place.test]):
        raise UnfitEngineError("the images do not fit into the GPU's memory")
    together, size = place.config.train.clients_per_round(len(place.train)), place.config.evaluate.batch_size
    all_take_part = together == len(place.train)
    try:
        with GLOBAL:  # only one run at a time may measure free memory and capture
            return GraphEngine(place, together, judged_at_once=size, states_on_device=all_take_part)
    except torch.OutOfMemoryError:
        raise FedncaError(
            "one client's step or a batch to evaluate does not fit on the GPU; "
            "use a smaller train.batch_size, evaluate.batch_size or data.image_size"
        ) from None
    except RuntimeError as error:  # for example, if a step waits for the device
        raise UnfitEngineError(f"a step cannot be captured ({str(error).partition(chr(10))[0]})") from error


def build_processes(place: Workplace) -> Engine:
    """Build the engine of CPU processes."""
    if hindrance := processes_hindrance(place):
        raise UnfitEngineError(hindrance)
    return ProcessEngine(place, place.config.workers or cores())


def processes_hindrance(place: Workplace) -> str:
    """Return why processes would not help or cannot execute the run, or nothing."""
    config = place.config
    if place.device.type != "cpu":
        return "processes train on a CPU"
    if platform.system() != "Linux":
        return f"{platform.system()} has no safe way to fork a process"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, which may not start others"
    if place.method.rule.centralized or config.train.clients_per_round(config.partition.clients) == 1:
        return "only one client trains in a round"
    if config.workers is None and cores() == 1:
        return "there is only one core"
    if not forks_can_train():
        return "torch cannot train in a fork of this process, which has trained beside a GPU"
    return ""
