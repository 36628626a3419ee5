"""One run: its folder, the loop of rounds, checkpoints and how to resume."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.runs.callbacks import Callback
    from fednca.runs.checkpoint import State, load_checkpoint, save_checkpoint
    from fednca.runs.history import Best, Round
    from fednca.runs.loggers import create_logger
    from fednca.runs.rounds import Finished, play_rounds
    from fednca.runs.run import Run
    from fednca.runs.training import resume, train
else:
    __getattr__, __dir__ = lazy(__name__, "callbacks", "loggers", "run", "training", "history", "checkpoint", "rounds")

__all__ = [
    "Best", "Callback", "Finished", "Round", "Run", "State", "create_logger", "load_checkpoint", "play_rounds",
    "resume", "save_checkpoint", "train",
]  # fmt: skip
