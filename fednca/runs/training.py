"""Training: begin a run, or resume an interrupted one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednca.base.devices import cpu_threads, pick_device
from fednca.base.errors import FedncaError, RunFailedError
from fednca.base.files import Writer, append_line, explain_write, resuming, write_atomic
from fednca.config import Config
from fednca.config.options import Options
from fednca.data.federation import Federation
from fednca.data.fetch import Progress
from fednca.data.load import data_options, federate, sites_note, unreadable_note
from fednca.engines.contract import Engine, Trained
from fednca.engines.model import build_model, restore_model
from fednca.engines.select import select_engine
from fednca.engines.workplace import build_workplace
from fednca.methods import create_method
from fednca.methods.contract import Method, Server, options_of
from fednca.methods.registry import option_owners
from fednca.models.heads import constants_of
from fednca.runs.callbacks import Callback
from fednca.runs.checkpoint import State, keep_checkpoint, load_last, save_checkpoint
from fednca.runs.folder import create_folder, default_folder, environment, forgotten_unless_begun, locked
from fednca.runs.history import final_results, truncate_history
from fednca.runs.rounds import is_over, play_rounds
from fednca.runs.run import Run


def train(config: Config, out: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train a federation in a new run folder, and return the run.

    Example: `train(load_config("demo"), "runs/mine")`.
    """
    method = create_method(config)
    pick_device(config.device)  # refuse it before images are prepared
    federation = federate(config, prepare_of(callbacks))
    model = build_model(config, method, federation.dataset.classes, pretrained=config.model.pretrained)
    folder = create_folder(Path(out) if out is not None else default_folder(config))
    with locked(folder), cpu_threads(config.threads):
        found = {"partition.clients": len(federation.train.partition.clients)}
        written = write_out(config.replace(found | {"data.options": plain(data_options(config))}), method)
        write_atomic(folder / "config.toml", written.to_toml().encode())
        with forgotten_unless_begun(folder):
            return _begin(Run(folder), federation, model, callbacks)


def resume(folder: str | Path, callbacks: Sequence[Callback] = ()) -> Run:
    """Continue an interrupted run from its last checkpoint; on a CPU the final weights are exactly the same."""
    run = Run(folder)
    pick_device(run.config.device)
    with locked(run.folder), cpu_threads(run.config.threads):
        if not (run.folder / "last.safetensors").exists():  # killed before the first checkpoint
            federation = federate(run.config, prepare_of(callbacks))
            pretrained = run.config.model.pretrained
            model = build_model(run.config, run.method, federation.dataset.classes, pretrained=pretrained)
            return _begin(run, federation, model, callbacks)
        try:
            state = load_last(run.folder)
        except FedncaError as error:
            raise FedncaError(f"{error}; delete that file to start the run again") from None
        truncate_history(run.folder / "history.jsonl", state.round)
        model = restore_model(run.config, run.method, run.federation.dataset.classes, state.constants)
        check_fit(run, model, state)
        if run.finished and state.round >= run.config.train.rounds:
            return run
        check_best(run, state)
        forget_results(run.folder)
        return _go_on(run, run.federation, model, state, callbacks)


def forget_results(folder: Path) -> None:
    """Delete the results of a finished run that gets more rounds, since it is no longer finished."""
    with explain_write(folder):
        for name in ("results.json", "final.safetensors", "final.json"):
            (folder / name).unlink(missing_ok=True)


def check_fit(run: Run, model: nn.Module, state: State) -> None:
    """Refuse a checkpoint or partition that does not fit the config beside it."""
    wanted, found = ({n: t.shape for n, t in tensors.items()} for tensors in (model.state_dict(), state.server.weights))
    if wanted != found:
        raise FedncaError(f"the checkpoint in '{run.folder}' does not fit the model of its config.toml; was it edited?")
    dealt, configured = len(run.federation.train.partition.clients), run.config.partition.clients
    if dealt != configured:
        raise FedncaError(f"partition.npz in '{run.folder}' has {dealt} clients, its config.toml {configured}")


def check_best(run: Run, state: State) -> None:
    """Refuse to go on with a run whose best model is not what a new round's would be compared with."""
    if run.method.closing is not None and state.best is not None and run.state("best").thresholds is None:
        raise FedncaError(
            f"the run in '{run.folder}' was begun by an older fednca, which kept its best model without the closing; "
            "finish it with that version, or begin a new run"
        )


def first_state(method: Method, model: nn.Module, clients: int) -> State:
    """Return the state before the first round."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    trainable = {name: weights[name] for name, weight in model.named_parameters() if weight.requires_grad}
    return State(0, Server(weights, method.rule.start_server(trainable, clients)), constants=constants_of(model))


def _begin(run: Run, federation: Federation, model: nn.Module, callbacks: Sequence[Callback]) -> Run:
    """Write the files of a new run, and start it."""
    with explain_write(run.folder / "partition.npz"):
        federation.save(run.folder / "partition.npz")
    facts = {
        "note": run.method.learner.note,
        "begun_in": str(Path.cwd()),  # where the config's relative paths start
        "unreadable": [each for split in federation.dataset.splits() for each in split.unreadable],
    }
    state = first_state(run.method, model, len(federation.train.partition.clients))
    write_beginning(run.folder, federation.dataset.classes, facts, state)
    return _go_on(run, federation, model, state, callbacks)


def write_beginning(folder: Path, classes: Sequence[str], facts: dict[str, Any], state: State) -> None:
    """Write the files that describe a run, and the checkpoint before its first round."""
    forget_results(folder)
    with explain_write(folder):
        (folder / "history.jsonl").unlink(missing_ok=True)  # its rounds have no checkpoint
    described = environment() | {"classes": classes} | facts
    write_atomic(folder / "environment.json", json.dumps(described, indent=1).encode())
    save_checkpoint(folder / "last.safetensors", state)


def _go_on(run: Run, federation: Federation, model: nn.Module, state: State, callbacks: Sequence[Callback]) -> Run:
    """Run the remaining rounds of a simulation."""
    device = pick_device(run.config.device)
    engine = select_engine(build_workplace(run.config, run.method, federation, model, device))
    started: list[Callback] = []
    unreadable = unreadable_note(federation.dataset, "the run's environment.json")
    try:
        for callback in callbacks:
            callback.on_start(run, federation, state.round)
            started.append(callback)
            for note in filter(None, [unreadable, sites_note(run.config, federation), engine.note]):
                callback.on_note(note)
        play(run, engine, to_device(state, device), callbacks)
    except RunFailedError as error:
        how = f"{resuming(run.folder)} goes on from the last good checkpoint, with what its config.toml then says"
        raise RunFailedError(f"{error} ({how})") from error
    finally:
        engine.close()
        for callback in started:
            callback.on_end(run)
    return run


def play(run: Run, engine: Engine, state: State, callbacks: Sequence[Callback]) -> None:
    """Run the remaining rounds on any engine, write history and checkpoints, and at the end the results.

    History is written before checkpoints: if the run is killed in between, `resume` cuts the history back to `last`.
    """

    def on_client(number: int, trained: Trained) -> None:
        for callback in callbacks:
            callback.on_client(number, trained.update.client, trained.losses)

    config, keeper = run.config, Keeper(run.folder)
    with Writer() as writer:
        done, kept, best = state, state.round, None
        try:
            for finished in play_rounds(config, run.method, engine, state, on_client):
                if finished.state.best is None and is_over(config, engine, finished.state.round):
                    break  # no model was ever judged: a resumed run plays this round again
                append_line(run.folder / "history.jsonl", json.dumps(finished.record.line()))
                done, best = finished.state, finished.best or best
                if engine.keeps_states:
                    keeper.keep(done, best)
                    kept = done.round
                elif done.round % config.train.checkpoint_every == 0:
                    writer.write(partial(keeper.keep, done, best))  # while the next round begins
                    kept = done.round
                for callback in callbacks:
                    callback.on_round(finished.record, done.best)
        finally:  # Ctrl-C, a failure or the last round: no finished round is lost
            if done.round > kept:
                writer.write(partial(keeper.keep, done, best))
    if done.best is None:
        raise RunFailedError("no model was judged by enough clients, so none can be chosen; fix that and resume")
    if done.round < config.train.rounds:
        for callback in callbacks:
            callback.on_note(f"the run ends after round {done.round}: {engine.ended()}")
    finish(run, engine.facts())


def finish(run: Run, facts: dict[str, Any]) -> None:
    """Write the final model, which is the best one, and the results with the engine's own entries."""
    results, best = final_results(run.history, run.config, facts), run.state("best")
    if best.thresholds is None:  # an older version began this run
        thresholds = torch.tensor(results["val"]["calibrated"]["thresholds"], dtype=torch.float64)
        best = replace(best, thresholds=thresholds)
    save_checkpoint(run.folder / "final.safetensors", best)
    write_atomic(run.folder / "results.json", json.dumps(results, indent=1).encode())


class Keeper:
    """Writes a run's checkpoints, and the best model only if it is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: State | None = None

    def keep(self, state: State, best: State | None) -> None:
        """Write the state to go on from, and the best model of the rounds up to it."""
        keep_checkpoint(self.folder, state, None if best is self.written else best)
        self.written = best


def prepare_of(callbacks: Sequence[Callback]) -> Progress:
    """Return a progress function that calls every callback."""

    def report(what: str, done: int, total: int) -> None:
        for callback in callbacks:
            callback.on_prepare(what, done, total)

    return report


def write_out(config: Config, method: Method) -> Config:
    """Return the config with every option of the method's parts written out."""
    written = {}
    for place, parts in option_owners(config.method).items():
        own = [method.parts[part] for part in parts if part in method.parts]
        written[f"method.{place}"] = {name: each for part in own for name, each in plain(part).items()}
    return config.replace(written)


def plain(options: Options) -> dict[str, Any]:
    """Return a part's own options as a config holds them."""
    return options.model_dump(mode="json", exclude_none=True, include=set(options_of(options)))


def to_device(state: State, device: torch.device) -> State:
    """Return the state with the server's tensors on the device; clients' tensors stay on the CPU until needed."""
    parts = (state.server.weights, state.server.state)
    own = ({name: tensor.to(device) for name, tensor in part.items()} for part in parts)
    return replace(state, server=Server(*own))
