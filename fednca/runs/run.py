"""Reading a run: a folder with its config, partition, history, checkpoints and results, finished or not."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fednca.base.errors import FedncaError
from fednca.base.files import is_utf8, named_in_utf8
from fednca.config import Config, build_config, read_toml
from fednca.data.federation import Federation
from fednca.data.load import data_root, load_dataset
from fednca.engines.model import restore_model
from fednca.methods import create_method
from fednca.methods.contract import Method
from fednca.runs.checkpoint import State, load_checkpoint
from fednca.runs.folder import read_json
from fednca.runs.history import Line, final_results, read_history


class Run:
    """A run's folder: its config, partition, history, checkpoints and results, finished or not.

    Example: `Run("runs/demo/fednca-ml").results["val"]["test"]["macro_f1"]`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open an existing run folder."""
        self.folder = named_in_utf8(folder)
        if not (self.folder / "config.toml").is_file():
            raise FedncaError(f"'{folder}' is not a run folder: it has no config.toml")
        self.config: Config = build_config(without_unread(read_toml(self.folder / "config.toml")))

    @property
    def history(self) -> list[Line]:
        """One line per finished round: losses by term, metrics, seconds, samples per second."""
        return read_history(self.folder / "history.jsonl")

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the results are written."""
        return (self.folder / "results.json").exists()

    @property
    def results(self) -> dict[str, Line]:
        """Metrics of a round chosen in three ways; if the run is not finished, from the rounds so far.

        `val`: best on validation, the primary one; `paper`: best on test, as the paper's code does; `last`: the last.
        In each, `calibrated` holds the metrics at the calibrated thresholds.
        """
        if not self.finished:
            return final_results(self.history, self.config, {})
        return read_json(self.folder / "results.json")

    @property
    def title(self) -> str:
        """The run's method with its learner, closing and remark, as shown with its results."""
        chosen, note = self.config.method, self.method.learner.note
        name = chosen.name if chosen.learner is None else f"{chosen.name} on {chosen.learner}"
        name += "" if chosen.closing is None else f", closing {chosen.closing}"
        return f"{name} ({note})" if note else name

    @cached_property
    def method(self) -> Method:
        """The method with the run's options."""
        return create_method(self.config)

    @cached_property
    def federation(self) -> Federation:
        """The images, divided among the clients as in the run."""
        path = self.folder / "partition.npz"
        if not path.is_file():
            way_out = "a run over Flower has none: its images are at the sites, and `flwr run` resumes it"
            raise FedncaError(f"'{path}' is not there; {way_out}")
        return Federation.load(path, load_dataset(self.placed))

    @property
    def placed(self) -> Config:
        """The config, its data where they were when the run began, from wherever it is looked at by now."""
        begun_in = Path(self.environment.get("begun_in", ""))
        there = {"data.root": begun_in / data_root(self.config)}
        if self.config.data.cache:
            there["data.cache"] = begun_in / self.config.data.cache
        # No config can hold a folder not named in UTF-8; relative to where the run began it is found all the same.
        told = {path: str(folder) for path, folder in there.items() if folder.exists() and is_utf8(str(folder))}
        return self.config.replace(told)

    @property
    def environment(self) -> dict[str, Any]:
        """What the numbers may depend on: versions, machine, threads; and the names of the classes."""
        return read_json(self.folder / "environment.json")

    def state(self, which: str = "final") -> State:
        """Return the `best` or the `last` checkpoint, or the `final` model of a finished run with its thresholds."""
        return load_checkpoint(self.folder / f"{which}.safetensors")

    def model(self, which: str = "final") -> nn.Module:
        """Return the trained model of the `best`, the `last` or the `final` checkpoint, in evaluation mode."""
        state, classes = self.state(which), tuple(self.environment["classes"])
        model = restore_model(self.config, self.method, classes, state.constants)
        model.load_state_dict(state.server.weights)
        return model.eval()


def without_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop options that older versions wrote out though nothing read them.

    They are those of the method's own learner where another one takes its place, and those of that one's closing.
    """
    from fednca.methods import find_method
    from fednca.methods.contract import options_of

    chosen = dict(values.get("method", {}))
    if "learner" in chosen:
        unread = {
            "options": find_method(chosen["name"]).learner,
            "learner_options": find_method(chosen["learner"]).closing,
        }
        for place, part in unread.items():
            if part is not None and isinstance(chosen.get(place), Mapping):
                names = options_of(part)
                chosen[place] = {name: each for name, each in chosen[place].items() if name not in names}
    return {**values, **({"method": chosen} if chosen else {})}
