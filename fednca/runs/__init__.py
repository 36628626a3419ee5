"""One run: its folder, the loop of rounds, checkpoints and how to resume."""

from fednca.runs.callbacks import Callback
from fednca.runs.run import Run
from fednca.runs.training import resume, train

__all__ = ["Callback", "Run", "resume", "train"]
