"""Fisher diagonals as `fisher` finds them, and by a loop over samples."""

import torch
from helpers import local_of

from fednca.engines.local_update import add_up
from fednca.measures import fisher


def trained_weights(model):
    """Return the weights that are trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def fisher_diagonal(learner, model, batches):
    """Return the mean of squared gradients over the samples of all batches."""
    losses, trained = local_of(model, learner).losses, trained_weights(model)
    total = add_up(fisher.fisher_sums(losses, model, trained, *batch) for batch in batches)
    return {name: each / sum(len(labels) for _, labels in batches) for name, each in total.items()}


def by_a_loop(learner, model, images, labels):
    """Return the mean of squared gradients, differentiating for one sample after the other."""
    model.eval()
    trained = trained_weights(model)
    expected = {name: torch.zeros_like(weight) for name, weight in trained.items()}
    for image, label in zip(images, labels, strict=True):
        loss = sum(learner.losses(model, image[None], label[None], None).values())
        for name, gradient in zip(trained, torch.autograd.grad(loss, trained.values()), strict=True):
            expected[name] += gradient**2 / len(images)
    return expected
