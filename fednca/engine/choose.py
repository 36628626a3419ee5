"""Which engine executes a run."""

import multiprocessing
import platform

import torch
from torch import nn

from fednca.config import Config
from fednca.data.processes import cores
from fednca.data.store import StoredImages
from fednca.engine.batches import Shard
from fednca.engine.eager import EagerEngine
from fednca.engine.graphs import GraphEngine
from fednca.engine.loop import Engine, clients_per_round
from fednca.engine.processes import ProcessEngine, forks_can_train
from fednca.errors import FedncaError, UnfitEngineError
from fednca.methods.base import Method
from fednca.randomness import GLOBAL


def choose_engine(
    config: Config, method: Method, model: nn.Module, train: list[Shard], judged: list[Shard], device: torch.device
) -> Engine:
    """Build the configured engine; `auto` takes the fastest one that can do the work and says why it is not another.

    train: one shard per client; judged: those whose images will be predicted.
    """
    eager = EagerEngine(method, model, train, config.train, config.seed)
    if config.engine == "eager":
        return eager
    wanted = config.engine
    if wanted == "auto":
        wanted = "graphs" if device.type == "cuda" else "processes"
    try:
        if wanted == "graphs":
            return build_graphs(config, eager, judged, device)
        return build_processes(config, eager, judged, device)
    except UnfitEngineError as reason:
        if config.engine != "auto":
            raise FedncaError(f"engine '{wanted}' cannot be used: {reason}; leave `engine` out") from None
        eager.note = f"engine: eager, since {reason}" if device.type == "cuda" else ""
        return eager


def build_graphs(config: Config, eager: EagerEngine, judged: list[Shard], device: torch.device) -> Engine:
    """Build the engine of CUDA graphs."""
    if device.type != "cuda":
        raise UnfitEngineError("CUDA graphs need a CUDA device")
    if any(isinstance(shard.store.pixels, StoredImages) for shard in [*eager.shards, *judged]):
        raise UnfitEngineError("the images do not fit into the GPU's memory")
    together, size = clients_per_round(config, len(eager.shards)), config.evaluate.batch_size
    all_take_part = together == len(eager.shards)
    try:
        with GLOBAL:  # while one run measures free memory and captures, no other may
            return GraphEngine(eager, judged, together, judged_at_once=size, keep_states=all_take_part)
    except torch.OutOfMemoryError:
        raise FedncaError(
            "one client's step or a batch to evaluate does not fit on the GPU; "
            "use a smaller train.batch_size, evaluate.batch_size or data.image_size"
        ) from None
    except RuntimeError as error:  # a step that waits for the device, say
        raise UnfitEngineError(f"a step cannot be captured ({str(error).partition(chr(10))[0]})") from error


def build_processes(config: Config, eager: EagerEngine, judged: list[Shard], device: torch.device) -> Engine:
    """Build the engine of CPU processes."""
    hindrance = processes_hindrance(config, eager.method, device)
    if hindrance:
        raise UnfitEngineError(hindrance)
    return ProcessEngine(eager, judged, config.workers or cores())


def processes_hindrance(config: Config, method: Method, device: torch.device) -> str:
    """Say why processes would not help or cannot execute the run, or nothing."""
    if device.type != "cpu":
        return "processes train on a CPU"
    if platform.system() != "Linux":
        return f"{platform.system()} has no safe way to fork a process"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, which may not start others"
    if method.centralized or clients_per_round(config, config.partition.clients) == 1:
        return "only one client trains in a round"
    if config.workers is None and cores() == 1:
        return "there is only one core"
    if not forks_can_train():
        return "torch cannot train in a fork of this process, which has trained beside a GPU"
    return ""
