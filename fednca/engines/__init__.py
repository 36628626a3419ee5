"""Engines: ways to train clients, add up their sums and judge models."""

from fednca.engines.contract import Engine, Judgement, LeftOut, Totals, Trained
from fednca.engines.eager import EagerEngine
from fednca.engines.graphs.engine import GraphEngine
from fednca.engines.images import ImageStore, Shard
from fednca.engines.local import LocalEngine, Workplace
from fednca.engines.local_update import Trainer
from fednca.engines.model import build_model, restore_model
from fednca.engines.processes import ProcessEngine
from fednca.engines.select import select_engine
from fednca.engines.workplace import build_workplace

__all__ = [
    "EagerEngine", "Engine", "GraphEngine", "ImageStore", "Judgement", "LeftOut", "LocalEngine", "ProcessEngine",
    "Shard", "Totals", "Trained", "Trainer", "Workplace", "build_model", "build_workplace", "restore_model",
    "select_engine",
]  # fmt: skip
