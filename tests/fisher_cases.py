"""Fisher diagonals by a loop, and BatchNorms; as a script, what kernels make of them in triton's interpreter."""

import sys
from unittest import mock

import torch
from kernel_cases import EVALUATED, Net, norm_in_evaluation
from torch import nn

from fednca import fisher
from fednca.engine import fuse, fused
from fednca.engine.eager import add_up
from fednca.methods.base import Local, Task
from fednca.methods.fedavg import FedAvg
from fednca.models import Classifier, build_backbone

FROZEN = {"nothing": [], "the first convolution": ["stem.0"], "all before the last": ["stem", "block.0", "block.1"]}


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


def norm(case, device):
    """Return a BatchNorm in float64 whose running mean is near the map's, however far that is from zero."""
    module = norm_in_evaluation(case, device)
    module.running_mean = (module.running_mean + case.mean).float().double()
    return module


def norm_by_a_loop(case, device="cpu"):
    """Return what BatchNorm makes of a map in float64, and the sums over samples of its squared gradients."""
    module, (x, g) = norm(case, device), case.tensors(device)
    x.requires_grad_()
    y = module(x)
    found = {"y": y.detach(), "x": torch.autograd.grad(y, x, g)[0], "weight": 0, "bias": 0}
    for one, g_of_one in zip(x.detach(), g, strict=True):
        own = torch.autograd.grad(module(one[None]), [module.weight, module.bias], g_of_one[None])
        found = found | {name: found[name] + each**2 for name, each in zip(("weight", "bias"), own, strict=True)}
    return found


def norm_by_kernel(case, device="cpu"):
    """Return what the kernels make of the same."""
    module = norm(case, device).float()
    x, g = (each.to(case.dtype) for each in case.tensors(device))
    x.requires_grad_()
    found = {}
    y = fisher.norm_by_kernel(module, x, found.update)
    return {"y": y.detach(), "x": torch.autograd.grad(y, x, g)[0]} | found


def network(frozen):
    """Return a learner, its model with running statistics unlike a batch's own, and a batch, in float64."""
    torch.manual_seed(0)
    learner = FedAvg()
    model = Classifier(Net(), learner.head(Task(tuple("abc"), 16))).double().to(memory_format=torch.channels_last)
    images = torch.randn(5, 3, 15, 17, dtype=torch.float64).to(memory_format=torch.channels_last)
    model(images)
    for path in FROZEN[frozen]:
        model.backbone.get_submodule(path).requires_grad_(False)
    return learner, model, images, (torch.rand(5, 3) < 0.4).double()


def resnet_on_gpu():
    """Return a learner, a ResNet-18 with running statistics unlike a batch's own, and a batch."""
    torch.manual_seed(0)
    learner = FedAvg()
    model = Classifier(build_backbone("resnet18"), learner.head(Task(tuple("abcde"), 512)))
    model = model.cuda().to(memory_format=torch.channels_last)
    images = torch.randn(21, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    labels = (torch.rand(21, 5, device="cuda") < 0.4).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.rand_like(weight) / 100)  # some scales start at 0 and would hide all behind them
        model(images)  # moves the running statistics
    return learner, model, images, labels


def diagonal_by_kernels(frozen):
    """Return the network's Fisher diagonal in float32, how its gradients lay, and how often torch normalised."""
    learner, model, images, labels = network(frozen)
    local, layouts = local_of(model.float()), []
    with (
        mock.patch.object(nn.functional, "batch_norm", wraps=nn.functional.batch_norm) as norms,
        mock.patch.object(nn.functional, "max_pool2d", side_effect=AssertionError),
        mock.patch.object(fisher, "squares_by_kernel", lambda _, __, δ: layouts.append(δ.stride(1))),
    ):
        found = fisher_diagonal(learner, local, [(images.float(), labels.float())])
    assert not any("forward" in vars(module) for module in model.modules())
    return found, layouts, norms.call_count


def main(path: str) -> None:
    """Save what the kernels make of all maps, and the Fisher diagonals of networks that use them."""
    fused.DEVICE, fuse.available = "cpu", lambda: True
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds NaN
    found = {("norm", name): norm_by_kernel(case) for name, case in EVALUATED.items()}
    for frozen in FROZEN:
        found["fisher", frozen] = diagonal_by_kernels(frozen)
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
