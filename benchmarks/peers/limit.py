"""The best the device could do: as many images, in batches of all clients together, by one model in one CUDA graph."""

import math
import time

import torch

from fednca.base.errors import FedncaError
from peers.work import Outcome, Work, loss_of

WARM_UP = 3  # steps before the capture, as PyTorch's documentation asks


def run(work: Work) -> Outcome:
    """Replay one captured training step in bf16 until it has seen as many images as all clients see."""
    if work.device.type != "cuda":
        raise FedncaError("the limit is measured on a CUDA device only")
    config = work.config.replace({"train.precision": "bf16"})
    model, train = work.model, config.train
    model.load_state_dict(work.initial)
    model.train()
    size = train.batch_size * len(work.chosen(1))
    images, labels = one_batch(work, size)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trainable, train.lr, weight_decay=train.weight_decay, capturable=True, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(work.method, model, images, labels, config).backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(math.ceil(work.count()[1] / size)):
        graph.replay()
    torch.cuda.synchronize()
    return Outcome(time.perf_counter() - began, None)


def one_batch(work: Work, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of this size: the first images of each client, repeated as needed."""
    parts = [next(shard.batches(work.config.train.batch_size)) for shard in work.shards[:size]]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    rows = torch.arange(size, device=images.device) % len(images)
    return images[rows].contiguous(memory_format=torch.channels_last), labels[rows]
