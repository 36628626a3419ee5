"""Checkpoints: one safetensors file with all tensors, and a few facts as JSON in its header and in a file beside it."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fednca.base.arrays import read_arrays
from fednca.base.errors import FedncaError
from fednca.base.files import write_atomic
from fednca.methods.contract import Server, Tensors
from fednca.runs.history import Best


@dataclass(frozen=True)
class State:
    """All that a run needs to go on, or that is needed to use a model."""

    round: int
    server: Server
    clients: dict[int, Tensors] = field(default_factory=dict)
    best: Best | None = None
    thresholds: Tensor | None = None  # (C,), if the model was judged
    constants: Tensors = field(default_factory=dict)  # what the model needs besides its weights


def save_checkpoint(path: Path, state: State) -> None:
    """Write the state to `path` (safetensors) atomically, and its facts to a JSON file of the same name."""
    tensors = {f"weights/{name}": tensor for name, tensor in state.server.weights.items()}
    tensors |= {f"server/{name}": tensor for name, tensor in state.server.state.items()}
    tensors |= {f"constants/{name}": tensor for name, tensor in state.constants.items()}
    for client, own in state.clients.items():
        tensors |= {f"client/{client}/{name}": tensor for name, tensor in own.items()}
    if state.thresholds is not None:
        tensors["thresholds"] = state.thresholds
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    owners = {tensor.data_ptr(): name for name, tensor in tensors.items()}  # safetensors refuses shared memory
    tensors = {name: t if owners[t.data_ptr()] == name else t.clone() for name, t in tensors.items()}
    best = state.best and {"round": state.best.round, "value": state.best.value}
    facts = json.dumps({"round": state.round, "best": best, "checksum": checksum(tensors)})
    write_atomic(path, save(tensors, {"fednca": facts}))
    write_atomic(path.with_suffix(".json"), facts.encode())


def keep_checkpoint(folder: Path, state: State, best: State | None) -> None:
    """Write the checkpoint `last` and, if there is a new best model, `best`.

    A new best model is written as `next` first, and renamed once `last` is written. So whenever the run is killed, the
    best model comes from a round that `last` includes, never from a lost one.
    """
    if best is not None:
        save_checkpoint(folder / "next.safetensors", best)
    save_checkpoint(folder / "last.safetensors", state)
    if best is not None:
        _take_best(folder, known=True)


def load_last(folder: Path) -> State:
    """Read `last`, and finish or drop a `next` that a killed run has left."""
    state = load_checkpoint(folder / "last.safetensors")
    aside = folder / "next.safetensors"
    if aside.exists():
        _take_best(folder, known=state.best is not None and load_checkpoint(aside).round == state.best.round)
    return state


def _take_best(folder: Path, *, known: bool) -> None:
    """Rename `next` to `best` if `last` includes its round (`known`); otherwise delete it."""
    for suffix in (".json", ".safetensors"):  # the one that tells that there is something to do comes last
        path = folder / f"next{suffix}"
        if known and path.exists():
            path.replace(folder / f"best{suffix}")
        path.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> State:
    """Read a state from the safetensors file alone, so a kill between the writes of the two files does no harm."""
    if not path.is_file():
        raise FedncaError(f"there is no checkpoint '{path}'")
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})["fednca"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["checksum"] != checksum(tensors):
            raise FedncaError(f"checkpoint '{path}' is corrupted: its checksum does not match")
        best = facts["best"] and Best(**facts["best"])
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FedncaError(f"checkpoint '{path}' is corrupted or not a checkpoint of fednca ({error})") from None
    except OSError as error:
        raise FedncaError(f"cannot read checkpoint '{path}': {error.strerror or error}") from None
    parts: dict[str, Tensors] = {"weights": {}, "server": {}, "constants": {}}
    clients: dict[int, Tensors] = {}
    thresholds = tensors.pop("thresholds", None)
    for path_in_file, tensor in tensors.items():
        kind, _, name = path_in_file.partition("/")
        if kind == "client":
            number, _, name = name.partition("/")
            clients.setdefault(int(number), {})[name] = tensor
        else:
            parts[kind][name] = tensor
    server, constants = Server(parts["weights"], parts["server"]), parts["constants"] or older_texts(path.parent)
    return State(facts["round"], server, clients, best, thresholds, constants)


def older_texts(folder: Path) -> Tensors:
    """Return the text rows that an older version kept in a file of their own, by their name among a model's constants.

    An older version kept no other constants, because they can be built again.
    """
    path = folder / "texts.npz"
    if not path.is_file():
        return {}
    rows = read_arrays(path, "put it back").get("table", np.empty(0))
    return {"head.texts": torch.from_numpy(rows).float()}


def checksum(tensors: Tensors) -> str:
    """Return a hash of the tensors' names and contents, in order of name."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
