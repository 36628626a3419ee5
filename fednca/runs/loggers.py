"""Callbacks that log a run to TensorBoard, Weights & Biases or MLflow while it trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.files import write_atomic
from fednca.base.packages import needed
from fednca.runs.callbacks import Callback

if TYPE_CHECKING:
    from fednca.data.federation import Federation
    from fednca.runs import Run
    from fednca.runs.history import Best, Round

PROJECT = "fednca"


def scalars(record: "Round") -> dict[str, float]:
    """Return the single numbers of a round by `kind/name`; what is not defined is left out."""
    kinds = {"loss": record.losses} | {kind: record.metrics.get(kind, {}) for kind in ("val", "test", "collapse")}
    kinds["calibrated"] = record.metrics.get("calibrated", {}).get("test", {})
    kinds["speed"] = {key: getattr(record, key) for key in ("seconds", "train_seconds", "samples_per_second")}
    found = {f"{kind}/{name}": value for kind, values in kinds.items() for name, value in values.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


class TensorBoardLogger(Callback):
    """Writes event files to `tensorboard/` in the run's folder."""

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Open a new event file, and discard what an interrupted run logged for later rounds."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.writer = SummaryWriter(run.folder / "tensorboard", purge_step=rounds_done + 1)

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Write the round's numbers."""
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record.number)

    def on_end(self, run: "Run") -> None:
        """Close the file."""
        self.writer.close()


class WandbLogger(Callback):
    """Logs to Weights & Biases, which reads its own environment variables (WANDB_MODE, WANDB_PROJECT, …)."""

    def __init__(self) -> None:
        self.wandb = needed("wandb", "wandb")

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Begin a run there, or continue the one that belongs to this folder."""
        with explained("wandb", self.wandb.Error):
            self.session = self.wandb.init(
                project=PROJECT,
                name=str(run.folder),
                dir=str(run.folder),
                config=run.config.model_dump(mode="json"),
                id=kept_id(run, "wandb") if rounds_done else None,
                resume="allow",
                settings=self.wandb.Settings(console="off"),  # the terminal belongs to the progress view
            )
        keep_id(run, "wandb", self.session.id)

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Send the round's numbers."""
        self.session.log(scalars(record), step=record.number)

    def on_end(self, run: "Run") -> None:
        """Mark the run as finished, or as failed."""
        self.session.finish(exit_code=0 if run.finished else 1)


class MLflowLogger(Callback):
    """Logs to MLflow, which reads its own environment variables (MLFLOW_TRACKING_URI, …)."""

    def __init__(self) -> None:
        self.mlflow = needed("mlflow", "mlflow")

    def on_start(self, run: "Run", federation: "Federation", rounds_done: int) -> None:
        """Begin a run there, with the config as its parameters, or continue the one that belongs to this folder."""
        before = kept_id(run, "mlflow") if rounds_done else None
        with explained("mlflow", self.mlflow.MlflowException):
            self.mlflow.set_experiment(PROJECT)
            started = self.mlflow.start_run(run_id=before, run_name=None if before else str(run.folder))
            if before is None:
                self.mlflow.log_params(flat(run.config.model_dump(mode="json", exclude_none=True)))
        keep_id(run, "mlflow", started.info.run_id)

    def on_round(self, record: "Round", best: "Best | None") -> None:
        """Send the round's numbers, without waiting for the server."""
        self.mlflow.log_metrics(scalars(record), step=record.number, synchronous=False)

    def on_end(self, run: "Run") -> None:
        """Mark the run as finished, or as failed."""
        self.mlflow.end_run("FINISHED" if run.finished else "FAILED")


LOGGERS: dict[str, type[Callback]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLflowLogger}


def create_logger(name: str) -> Callback:
    """Return a new logger by name."""
    if name not in LOGGERS:
        raise unknown_name("logger", name, LOGGERS)
    return LOGGERS[name]()


@contextmanager
def explained(service: str, failure: type[Exception]) -> Iterator[None]:
    """Report in one sentence that a service cannot start."""
    try:
        yield
    except failure as error:
        raise FedncaError(f"{service} cannot start: {' '.join(str(error).split())}") from None


def kept_id(run: "Run", service: str) -> str | None:
    """Return the id that a service gave this folder's run, if it gave one."""
    path = run.folder / f"{service}-id.txt"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep_id(run: "Run", service: str, name: str) -> None:
    """Save the id that a service gave this folder's run."""
    write_atomic(run.folder / f"{service}-id.txt", name.encode())


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted path.

    >>> flat({"train": {"lr": 0.1}, "seed": 0})
    {'train.lr': 0.1, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
