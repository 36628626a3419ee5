"""Fisher diagonals as `fisher` finds them, and by a loop over samples."""

import torch

from fednca.engines.local_update import add_up
from fednca.measures import fisher
from fednca.methods.contract import Local


def local_of(model, **fields):
    """Return a client that has a model."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Local(0, 1, 0.1, model, start, **({"received": {}, "state": {}, "rng": torch.Generator()} | fields))


def fisher_diagonal(learner, local, batches):
    """Return the mean of squared gradients over the samples of all batches."""
    total = add_up(fisher.fisher_sums(learner, local, *batch) for batch in batches)
    return {name: each / sum(len(labels) for _, labels in batches) for name, each in total.items()}


def by_a_loop(learner, model, images, labels):
    """Return the mean of squared gradients, differentiating for one sample after the other."""
    model.eval()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    expected = {name: torch.zeros_like(weight) for name, weight in trained.items()}
    for image, label in zip(images, labels, strict=True):
        loss = sum(learner.losses(model, image[None], label[None], None).values())
        for name, gradient in zip(trained, torch.autograd.grad(loss, trained.values()), strict=True):
            expected[name] += gradient**2 / len(images)
    return expected
