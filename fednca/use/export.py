"""Write a trained model as one file for other programs: ONNX, TorchScript or safetensors, checked first."""

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

from fednca.base.errors import RunFailedError
from fednca.base.files import explain_write, write_atomic
from fednca.base.packages import needed
from fednca.base.randomness import numpy_rng
from fednca.use.card import model_card
from fednca.use.model import TrainedModel, load_model

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}
TOLERANCE = 1e-4  # largest difference of a probability between programs that round differently
BATCHES = (1, 3)  # batch sizes to try a file with; it was traced with another one

Floats = NDArray[np.float32]
Reader = Callable[[Floats], Floats]  # images (B, 3, H, W) → probabilities (B, C), by the file's content


class Probabilities(nn.Module):
    """A model that returns probabilities (B, C) instead of logits."""

    def __init__(self, model: nn.Module, activate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.activate = activate

    def forward(self, images: Tensor) -> Tensor:
        """Score normalised images (B, 3, H, W)."""
        return self.activate(self.model(images).logits)


def export(model: TrainedModel, kind: str, path: Path) -> tuple[float, Path]:
    """Write the model with its card beside it; return the largest difference found and the card's path.

    A file whose probabilities differ from the model's by more than `TOLERANCE` is not written.
    """
    graph = Probabilities(copy.deepcopy(model.model).cpu().float(), model.run.method.learner.probabilities).eval()
    build = {"onnx": build_onnx, "torchscript": build_torchscript, "safetensors": build_safetensors}[kind]
    content, read = build(graph, model, metadata(model, kind))
    try:
        difference = deviation(graph, read, model)
    except RuntimeError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise RunFailedError(
            f"the {kind} file cannot score images ({reason}), so it was not written; choose another --to"
        ) from error
    if not difference <= TOLERANCE:
        raise RunFailedError(
            f"the {kind} file's probabilities differ from the model's by {difference:.2g}, so it was not written; "
            "choose another --to"
        )
    card, text = path.with_name(f"{path.name}.md"), model_card(model, path.name, kind)
    with explain_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    write_atomic(card, text.encode(errors="backslashreplace"))
    return difference, card


def metadata(model: TrainedModel, kind: str) -> dict[str, str]:
    """Return the facts that a user of the file needs; lists and numbers are JSON."""
    mean, std = model.moments()
    shape = f"(batch, 3, {model.size}, {model.size})"
    facts = {
        "input": f"images: float32 {shape}, RGB, normalised: (byte / 255 - mean) / std",
        "output": f"probabilities: float32 (batch, {len(model.classes)}), one for each class, not logits",
        "resize": "squash to a square, bilinear with antialiasing, as Pillow does",
        "image_size": str(model.size),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
        "classes": json.dumps(model.classes, ensure_ascii=False),
        "thresholds": json.dumps(model.thresholds.tolist()),
        "calibrated": json.dumps(model.calibrated),
        "dataset": model.data,
        "method": model.run.title,
        "round": str(model.round),
    }
    if kind == "safetensors":  # only weights: the config says of which model
        facts["output"] = "none: these are the weights and fixed tensors of the model that `config` describes"
        facts["config"] = model.run.config.to_toml()
    return facts


def deviation(graph: nn.Module, read: Reader, model: TrainedModel) -> float:
    """Return the largest difference between the file's probabilities and the model's, on random images."""
    rng = numpy_rng(0, "export")
    largest = 0.0
    for batch in BATCHES:
        pixels = rng.integers(0, 256, (batch, model.size, model.size, 3), dtype=np.uint8)
        images = model.normalise(pixels).cpu().float().contiguous()
        with torch.no_grad():
            expected = graph(images).numpy()
        largest = max(largest, float(np.abs(read(images.numpy()) - expected).max()))
    return largest


def example(model: TrainedModel) -> Tensor:
    """Return the images to trace the model with: two, since tracing may treat a batch of one as a special case."""
    return torch.zeros(2, 3, model.size, model.size)


def build_onnx(graph: Probabilities, model: TrainedModel, facts: dict[str, str]) -> tuple[bytes, Reader]:
    """Return an ONNX file for batches of any size, and a reader that runs it with onnxruntime."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when onnxruntime is imported
    onnx, onnxruntime, _ = (needed(name, "export") for name in ("onnx", "onnxruntime", "onnxscript"))
    images = example(model)
    with torch.no_grad():
        graph(images)  # builds the tables that depend on the map's size, so that they become constants
    with quiet():
        program = torch.onnx.export(
            graph,
            (images,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes={"images": {0: "batch"}},
        )
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # paths of the code on this machine
    onnx.helper.set_model_props(proto, facts)
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda batch: session.run(None, {"images": batch})[0]


def build_torchscript(graph: Probabilities, model: TrainedModel, facts: dict[str, str]) -> tuple[bytes, Reader]:
    """Return a TorchScript archive with its facts as `metadata.json`, and a reader that runs it with torch."""
    buffer = io.BytesIO()
    with quiet(), torch.no_grad():
        traced = torch.jit.trace(graph, (example(model),), check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, buffer, _extra_files={"metadata.json": json.dumps(facts, ensure_ascii=False)})
        loaded = torch.jit.load(io.BytesIO(buffer.getvalue()))  # type: ignore[no-untyped-call]
    return buffer.getvalue(), run_with(loaded)


def build_safetensors(graph: Probabilities, model: TrainedModel, facts: dict[str, str]) -> tuple[bytes, Reader]:
    """Return all weights and fixed tensors by name, and a reader that runs a new model with them."""
    content = save({name: tensor.clone().contiguous() for name, tensor in tensors_of(graph.model).items()}, facts)
    fresh = load_model(model.run, model.which).float()
    wanted = tensors_of(fresh)
    for tensor in wanted.values():
        tensor.zero_()
    for name, tensor in load(content).items():
        wanted[name].copy_(tensor)
    return content, run_with(Probabilities(fresh, graph.activate))


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return weights, buffers and fixed tensors by name, without copying them."""
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def run_with(module: nn.Module) -> Reader:
    """Return a reader that lets a torch module score arrays."""

    def read(batch: Floats) -> Floats:
        with torch.no_grad():
            found: Floats = module(torch.from_numpy(batch)).numpy()
        return found

    return read


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' warnings about our code, themselves and constants."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
