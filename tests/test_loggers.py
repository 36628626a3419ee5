import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from helpers import Stop, StopAfter, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fednca.base.errors import FedncaError
from fednca.runs import resume, train
from fednca.runs.callbacks import Callback
from fednca.runs.loggers import create_logger

SCALARS = {"macro_auc", "micro_auc", "macro_f1", "micro_f1", "mean_ap"}


class Service(ModuleType):
    """Stands for wandb and mlflow: keeps what it is told, by run and step, and says no if asked to."""

    Error = MlflowException = ConnectionError

    def __init__(self, refuses=False):
        super().__init__("service")
        self.refuses, self.runs, self.params, self.ended, self.metrics = refuses, [], {}, [], {}

    def init(self, *, project, name, config, id, resume, **_):
        if self.refuses:
            raise ConnectionError("no\nserver")
        self.params = config
        self.runs.append(id or f"run-{len(self.runs)}")
        return SimpleNamespace(
            id=self.runs[-1], log=self.log_metrics, finish=lambda exit_code: self.ended.append(exit_code)
        )

    def Settings(self, **_):  # noqa: N802
        return None

    def set_experiment(self, name):
        if self.refuses:
            raise ConnectionError("no\nserver")

    def start_run(self, run_id, run_name):
        self.runs.append(run_id or f"run-{len(self.runs)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.runs[-1]))

    def log_params(self, params):
        self.params = params

    def log_metrics(self, metrics, *, step, **_):
        self.metrics[self.runs[-1], step] = metrics

    def end_run(self, status):
        self.ended.append(status)


class Ended(Callback):
    """Hears whether it was told of the end."""

    heard = False

    def on_end(self, run):
        self.heard = True


def train_with_a_break(logger, folder):
    """Train three of four rounds, and go on from the second with a new logger of the same kind."""
    config = tiny(train__rounds=4, train__checkpoint_every=2, evaluate__every=2)
    with pytest.raises(Stop):
        train(config, folder, [create_logger(logger), StopAfter(3)])
    return resume(folder, [create_logger(logger)])


def check(found, history):
    """Compare what was logged, by name and round, with the history."""
    for record in history:
        step = record["round"]
        for term, value in record["losses"].items():
            assert found[f"loss/{term}", step] == pytest.approx(value)
        assert found["speed/samples_per_second", step] == pytest.approx(record["samples_per_second"])
        for part in ("val", "test"):
            logged = {name.removeprefix(f"{part}/") for name, at in found if at == step and name.startswith(part)}
            assert logged == (SCALARS if part in record else set())
            for name in logged:
                assert found[f"{part}/{name}", step] == pytest.approx(record[part][name])


def test_tensorboard_reads_back_every_round_once(tmp_path):
    run = train_with_a_break("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("loss/bce")] == [1, 2, 3, 4]
    check({(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}, run.history)


@pytest.mark.parametrize(("name", "ends"), [("wandb", [1, 0]), ("mlflow", ["FAILED", "FINISHED"])])
def test_a_service_hears_of_every_round_in_one_run(name, ends, tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, name, service)
    run = train_with_a_break(name, tmp_path / "run")
    assert service.runs == ["run-0", "run-0"]
    assert service.ended == ends
    check(
        {(key, step): value for (_, step), told in service.metrics.items() for key, value in told.items()}, run.history
    )
    rounds = service.params["train"]["rounds"] if name == "wandb" else service.params["train.rounds"]
    assert rounds == run.config.train.rounds


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_stops_a_service_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedncaError, match=rf"needs the package '{name}': pip install 'fednca\[{name}\]'"):
        create_logger(name)
    monkeypatch.setitem(sys.modules, name, Service(refuses=True))
    with pytest.raises(FedncaError, match=f"{name} cannot start: no server"):
        train(tiny(), tmp_path / "run", [ended := Ended(), create_logger(name)])
    assert ended.heard
    assert not (tmp_path / "run").exists()


def test_a_wrong_name_lists_the_right_ones():
    with pytest.raises(FedncaError, match="did you mean 'tensorboard'"):
        create_logger("tensorbord")


def test_tensorboard_is_loaded_only_where_it_is_used():
    code = "import sys, fednca.runs.loggers, fednca.runs; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
