"""A run is a folder; `train` makes one, `resume` goes on with it, `Run` reads it."""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednca.callbacks import Callback
from fednca.config import Config, build_config, read_toml
from fednca.data.federation import Federation
from fednca.data.fetch import Progress
from fednca.engine.checkpoint import State, keep_checkpoint, load_checkpoint, load_last, save_checkpoint
from fednca.engine.eager import Result
from fednca.engine.loop import Job, Record, close, run_rounds
from fednca.errors import FedncaError, RunFailedError
from fednca.files import Writer, append_line, explain_write, is_utf8, named_in_utf8, resuming, write_atomic
from fednca.methods import create_method
from fednca.methods.base import Method, Server
from fednca.options import Options
from fednca.runfiles import (
    TEXTS,
    create_folder,
    default_folder,
    environment,
    forgotten_unless_begun,
    keep_texts,
    locked,
    read_history,
    read_json,
    truncate_history,
)
from fednca.setup import (
    build_job,
    build_model,
    cpu_threads,
    data_options,
    data_root,
    federate,
    load_dataset,
    pick_device,
    sites_note,
    unreadable_note,
)


class Run:
    """A run's folder: its config, partition, history, checkpoints and results, finished or not.

    Example: `Run("runs/demo/fednca-ml").results["val"]["test"]["macro_f1"]`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open an existing run folder."""
        self.folder = named_in_utf8(folder)
        if not (self.folder / "config.toml").is_file():
            raise FedncaError(f"'{folder}' is not a run folder: it has no config.toml")
        self.config: Config = build_config(read_toml(self.folder / "config.toml"))

    @property
    def history(self) -> list[Record]:
        """One record per finished round: losses by term, metrics, seconds, samples per second."""
        return read_history(self.folder / "history.jsonl")

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the results are written."""
        return (self.folder / "results.json").exists()

    @property
    def results(self) -> dict[str, Record]:
        """Metrics of the round chosen in each of three ways, up to now where the run is not finished.

        `val`: best on validation, the primary one; `paper`: best on test, as the paper's code does; `last`: the last.
        In `val` and `last` of a finished run, `calibrated` holds the metrics at the calibrated thresholds.
        """
        if not self.finished:
            return select_rounds(self.history, self.config)
        return read_json(self.folder / "results.json")

    @property
    def title(self) -> str:
        """The run's method by name, with its learner and what must be said of it wherever results are shown."""
        config, note = self.config.method, self.method.learner.note
        name = config.name if config.learner is None else f"{config.name} on {config.learner}"
        return f"{name} ({note})" if note else name

    @cached_property
    def method(self) -> Method:
        """The method with the run's hyper-parameters and the text table that the run keeps, if it does."""
        method = create_method(self.config)
        method.learner.kept_texts = self.folder / TEXTS
        return method

    @cached_property
    def federation(self) -> Federation:
        """The images, dealt to the clients as in the run."""
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
        model = build_model(self.config, self.method, tuple(self.environment["classes"]), pretrained="none")
        model.load_state_dict(self.state(which).server.weights)
        return model.eval()


def train(config: Config, out: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train a federation from the beginning into a new folder and return its run.

    Example: `train(load_config("demo"), "runs/mine")`.
    """
    method = create_method(config)
    device = pick_device(config.device)
    federation = federate(config, prepare_of(callbacks))
    model = build_model(config, method, federation.dataset.classes, pretrained=config.model.pretrained)
    folder = create_folder(Path(out) if out is not None else default_folder(config))
    with locked(folder), cpu_threads(config.threads):
        write_atomic(folder / "config.toml", resolve(config, method, federation).to_toml().encode())
        with forgotten_unless_begun(folder):
            return _begin(Run(folder), federation, model, device, callbacks)


def resume(folder: str | Path, callbacks: Sequence[Callback] = ()) -> Run:
    """Go on with an interrupted run from its last checkpoint; on a CPU it ends with the very same weights."""
    run = Run(folder)
    device = pick_device(run.config.device)
    with locked(run.folder), cpu_threads(run.config.threads):
        if not (run.folder / "last.safetensors").exists():  # killed before the first checkpoint
            federation = federate(run.config, prepare_of(callbacks))
            pretrained = run.config.model.pretrained
            (run.folder / TEXTS).unlink(missing_ok=True)  # its config may name another by now
            model = build_model(run.config, run.method, federation.dataset.classes, pretrained=pretrained)
            return _begin(run, federation, model, device, callbacks)
        try:
            state = to_device(load_last(run.folder), device)
        except FedncaError as error:
            raise FedncaError(f"{error}; if that file is deleted, the run begins anew") from None
        truncate_history(run.folder / "history.jsonl", state.round)
        model = build_model(run.config, run.method, run.federation.dataset.classes, pretrained="none")
        check_fit(run, model, state)
        if state.round < run.config.train.rounds:
            forget_results(run.folder)
        return _go_on(run, run.federation, model, state, device, callbacks)


def forget_results(folder: Path) -> None:
    """Drop the results of a finished run that is given more rounds: it is not finished any more."""
    with explain_write(folder):
        for name in ("results.json", "final.safetensors", "final.json"):
            (folder / name).unlink(missing_ok=True)


def check_fit(run: Run, model: nn.Module, state: State) -> None:
    """Refuse a checkpoint or partition that does not belong to the config beside it."""
    wanted, found = ({n: t.shape for n, t in tensors.items()} for tensors in (model.state_dict(), state.server.weights))
    if wanted != found:
        raise FedncaError(f"the checkpoint in '{run.folder}' does not fit the model of its config.toml; was it edited?")
    dealt, configured = len(run.federation.train.partition.clients), run.config.partition.clients
    if dealt != configured:
        raise FedncaError(f"partition.npz in '{run.folder}' has {dealt} clients, its config.toml {configured}")


def _begin(
    run: Run, federation: Federation, model: nn.Module, device: torch.device, callbacks: Sequence[Callback]
) -> Run:
    """Write what a run is before its first round, and start."""
    with explain_write(run.folder):
        (run.folder / "history.jsonl").unlink(missing_ok=True)  # of rounds whose checkpoint is gone
    with explain_write(run.folder / "partition.npz"):
        federation.save(run.folder / "partition.npz")
    facts = environment() | {"classes": federation.dataset.classes, "note": run.method.learner.note}
    facts["begun_in"] = str(Path.cwd())  # what relative paths of the config are meant from
    facts["unreadable"] = [each for split in federation.dataset.splits() for each in split.unreadable]
    write_atomic(run.folder / "environment.json", json.dumps(facts, indent=1).encode())
    keep_texts(run.folder, federation.dataset.classes, model)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    trainable = {name: weights[name] for name, weight in model.named_parameters() if weight.requires_grad}
    state = State(0, Server(weights, run.method.start_server(trainable)))
    save_checkpoint(run.folder / "last.safetensors", state)
    return _go_on(run, federation, model, to_device(state, device), device, callbacks)


def _go_on(
    run: Run,
    federation: Federation,
    model: nn.Module,
    state: State,
    device: torch.device,
    callbacks: Sequence[Callback],
) -> Run:
    """Run the rounds that are left, keeping history and checkpoints, and write the results."""
    job = build_job(run.config, run.method, federation, model, device)
    started: list[Callback] = []
    unreadable = unreadable_note(federation.dataset, "the run's environment.json")

    def on_client(number: int, result: Result) -> None:
        for callback in callbacks:
            callback.on_client(number, result.update.client, result.losses)

    try:
        for callback in callbacks:
            callback.on_start(run, federation, state.round)
            started.append(callback)
            for note in filter(None, [unreadable, sites_note(run.config, federation), job.engine.note]):
                callback.on_note(note)
        # History first, then checkpoints: `resume` cuts history back to `last`, which mends a kill in between.
        with Writer() as writer:
            done, kept, best = state, state.round, None
            keeper = Keeper(run.folder)
            try:
                for after, record, is_best in run_rounds(job, state, on_client):
                    append_line(run.folder / "history.jsonl", json.dumps(record))
                    if is_best:
                        best = State(after.round, Server(after.server.weights), best=after.best)  # to use, not to go on
                    done = after
                    if done.round % run.config.train.checkpoint_every == 0:
                        writer.write(partial(keeper.keep, done, best))  # while the next round begins
                        kept = done.round
                    for callback in callbacks:
                        callback.on_round(record, done.best)
            finally:  # Ctrl-C, a failure or the last round: no finished round is lost
                if done.round > kept:
                    writer.write(partial(keeper.keep, done, best))
        results = final_results(run)
        save_final(run, job, results["val"]["calibrated"]["thresholds"])
        write_atomic(run.folder / "results.json", json.dumps(results, indent=1).encode())
    except RunFailedError as error:
        how = f"{resuming(run.folder)} goes on from the last good checkpoint, with what its config.toml then says"
        raise RunFailedError(f"{error} ({how})") from error
    finally:
        job.engine.close()
        for callback in started:
            callback.on_end(run)
    return run


class Keeper:
    """Writes a run's checkpoints, the best model only where it is not written yet."""

    def __init__(self, folder: Path) -> None:
        """Begin with a best model that is written, if there is one."""
        self.folder = folder
        self.written: State | None = None

    def keep(self, state: State, best: State | None) -> None:
        """Write the state to go on from, and the best model of the rounds up to it."""
        keep_checkpoint(self.folder, state, None if best is self.written else best)
        self.written = best


def prepare_of(callbacks: Sequence[Callback]) -> Progress:
    """Return the progress function that tells every callback."""

    def tell(what: str, done: int, total: int) -> None:
        for callback in callbacks:
            callback.on_prepare(what, done, total)

    return tell


def final_results(run: Run) -> dict[str, Record]:
    """Return the results with what the chosen rounds showed at their calibrated thresholds."""
    history = run.history
    results = select_rounds(history, run.config)
    for name in ("val", "last"):
        results[name]["calibrated"] = history[results[name]["round"] - 1]["calibrated"]
    return results


def save_final(run: Run, job: Job, thresholds: list[float]) -> None:
    """Write the model to use: the best one, after its closing exchange."""
    state = to_device(run.state("best"), job.test.rows.device)
    server = close(job, Server(state.server.weights))
    final = State(state.round, server, best=state.best, thresholds=torch.tensor(thresholds, dtype=torch.float64))
    save_checkpoint(run.folder / "final.safetensors", final)


def select_rounds(history: list[Record], config: Config) -> dict[str, Record]:
    """Choose a round in three ways: best validation, best test (the paper's code), last."""
    judged = [record for record in history if "test" in record]
    if not judged:
        return {}

    def score(record: Record, split: str) -> tuple[float, int]:
        value = record[split][config.evaluate.select]
        return (float("-inf") if value is None else value, record["round"])  # of equals the later one

    chosen = {
        "val": max(judged, key=lambda record: score(record, "val")),
        "paper": max(judged, key=lambda record: score(record, "test")),
        "last": judged[-1],
    }
    return {name: {key: record[key] for key in ("round", "val", "test")} for name, record in chosen.items()}


def resolve(config: Config, method: Method, federation: Federation) -> Config:
    """Return the config with every option of method and dataset written out, and the true number of clients."""
    clients = len(federation.train.partition.clients)
    return write_out(
        config.replace({"partition.clients": clients, "data.options": plain(data_options(config))}), method
    )


def write_out(config: Config, method: Method) -> Config:
    """Return the config with every option of the method and its learner written out."""
    options = {"method.options": plain(method.hyper)}
    if config.method.learner is not None:
        options["method.learner_options"] = plain(method.learner.hyper)
    return config.replace(options)


def plain(options: Options) -> dict[str, Any]:
    """Return options as a config holds them."""
    return options.model_dump(mode="json", exclude_none=True)


def to_device(state: State, device: torch.device) -> State:
    """Return the state with the server's tensors on the device; clients' wait on the host until they take part."""
    server = Server(
        {name: tensor.to(device) for name, tensor in state.server.weights.items()},
        {name: tensor.to(device) for name, tensor in state.server.state.items()},
    )
    return State(state.round, server, state.clients, state.best)
