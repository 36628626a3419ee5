"""Run folders as versions before parts wrote them, made of fresh ones by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import tomli_w

from fednca.config import read_toml
from fednca.engines.model import build_model
from fednca.methods import find_method
from fednca.methods.contract import Server, options_of
from fednca.runs import Run
from fednca.runs.checkpoint import load_checkpoint, save_checkpoint


def age(run: Run) -> Run:
    """Take from a run's folder what older versions did not write, and add what only they wrote."""
    texts = run.state("last").constants.get("head.texts")
    for which in ("last", "best", "final"):
        if (path := run.folder / f"{which}.safetensors").exists():
            _age_checkpoint(run, path)
    if texts is not None:
        np.savez(run.folder / "texts.npz", names=np.array(run.environment["classes"]), table=texts.numpy())
    if run.finished:
        results = run.results
        del results["paper"]["calibrated"]
        (run.folder / "results.json").write_text(json.dumps(results))
    _age_config(run.folder / "config.toml")
    return Run(run.folder)


def _age_checkpoint(run: Run, path: Path) -> None:
    """Drop constants; and of the best model the thresholds and what the closing made of it."""
    state = replace(load_checkpoint(path), constants={})
    if path.stem == "best":
        state, weights = replace(state, thresholds=None), state.server.weights
        if run.method.closing is not None:  # the classifier that training leaves as it is
            fresh = build_model(run.config, run.method, tuple(run.environment["classes"]), pretrained="none")
            before = {name: each for name, each in fresh.state_dict().items() if name.startswith("head.")}
            state = replace(state, server=Server(weights | before))
    save_checkpoint(path, state)


def _age_config(path: Path) -> None:
    """Write out the options of the learner that is replaced, and those of the closing that is not held."""
    values = read_toml(path)
    chosen = values["method"]
    del chosen["closing_options"]
    if "learner" in chosen:
        own, other = find_method(chosen["name"]), find_method(chosen["learner"])
        chosen["options"] |= {name: getattr(own.learner, name) for name in options_of(own.learner)}
        if other.closing is not None:
            chosen["learner_options"] |= {name: getattr(other.closing, name) for name in options_of(other.closing)}
    path.write_text(tomli_w.dumps(values))
