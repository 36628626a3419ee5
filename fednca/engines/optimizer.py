"""All weights of a model in one vector, and an optimiser that updates the vector in one step.

The model's weights are views of the vector, so one operation on it changes them all. If each weight had operations of
its own, their Python code (on a GPU, their launches) would take longer than the arithmetic.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fednca.base.tensors import Layout, Packed
from fednca.config import TrainConfig
from fednca.methods.contract import Method, Tensors

OPTIMIZER = "optimizer."  # prefix of a kept optimiser's tensors in a client's state

Gradients = Sequence[Tensor | None]  # of weights in their order; None where a loss does not depend on one


class VectorOptimizer:
    """Updates the trainable ones of packed tensors by their gradients."""

    def __init__(self, values: Packed, trainable: list[str], config: TrainConfig, method: Method) -> None:
        """Take packed tensors, the trainable ones first, and make room for gradients and moments."""
        layout = Layout.of({name: values[name] for name in trainable})
        ((dtype, lengths),) = layout.lengths.items()
        self.vector = nn.Parameter(values.vectors[dtype][: sum(lengths)])
        self.vector.grad = torch.zeros_like(self.vector)
        self.gradients = Packed(layout, {dtype: self.vector.grad})
        self.clip_norm = config.clip_norm or method.learner.clip_norm
        self.optimizer = make_optimizer([self.vector], config, method)
        # Torch would make this state in the first step. It is made here, since `_move` calls torch's kernels directly,
        # and a CUDA graph needs addresses that do not change.
        self.state = self.optimizer.state[self.vector]
        if config.optimizer == "adamw":
            self.state["step"] = torch.zeros((), device=self.vector.device)
            self.state |= {name: torch.zeros_like(self.vector) for name in ("exp_avg", "exp_avg_sq")}
        elif config.momentum:
            self.state["momentum_buffer"] = torch.zeros_like(self.vector)

    def reset(self) -> None:
        """Set everything as before the first step, in place, since a CUDA graph keeps the addresses."""
        if self.state:
            torch._foreach_zero_(list(self.state.values()))

    def take(self, found: Gradients) -> None:
        """Take the weights' gradients; a weight without one gets zero, and still decays.

        Autograd makes each gradient a tensor of its own; here they are copied side by side.
        """
        pairs = list(self._pairs(found))
        if len(pairs) < len(found):
            self.gradients.vectors[self.vector.dtype].zero_()
        for dtype in dict.fromkeys(each.dtype for _, each in pairs):  # of mixed dtypes, torch copies one by one
            places, those = zip(*[pair for pair in pairs if pair[1].dtype == dtype], strict=True)
            torch._foreach_copy_(places, those)

    def add(self, found: Gradients) -> None:
        """Add to the weights' gradients."""
        if pairs := list(self._pairs(found)):
            torch._foreach_add_(*zip(*pairs, strict=True))

    def step(self) -> None:
        """Update the weights."""
        if self.clip_norm:
            nn.utils.clip_grad_norm_([self.vector], self.clip_norm)
        with torch.no_grad():
            self._move()

    def dump(self) -> Tensors:
        """Return the optimiser's tensors by weight, for a client that keeps them between rounds."""
        kept: Tensors = {}
        for key, value in self.state.items():
            own = self._by_name(value.clone())
            kept |= {f"{OPTIMIZER}{name}/{key}": tensor for name, tensor in own.items()}
        return kept

    def load(self, kept: Tensors) -> None:
        """Put back what `dump` returned."""
        for key, value in self.state.items():
            for name, tensor in self._by_name(value).items():
                if (path := f"{OPTIMIZER}{name}/{key}") in kept:  # older states lack weights that had no gradient
                    tensor.copy_(kept[path])

    def _move(self) -> None:
        """Do what torch's optimiser would, without its Python, which takes longer than the kernel."""
        assert self.vector.grad is not None
        (group,) = self.optimizer.param_groups
        same = {key: group[key] for key in ("lr", "weight_decay", "maximize")}
        if isinstance(self.optimizer, torch.optim.SGD):
            moments = [self.state["momentum_buffer"]] if group["momentum"] else []
            own = {key: group[key] for key in ("momentum", "dampening", "nesterov")}
            torch._fused_sgd_([self.vector], [self.vector.grad], moments, **same, **own, is_first_step=False)
            return
        self.state["step"].add_(1)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [self.vector],
            [self.vector.grad],
            [self.state["exp_avg"]],
            [self.state["exp_avg_sq"]],
            [],
            [self.state["step"]],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            amsgrad=False,
            **same,
        )

    def _pairs(self, found: Gradients) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (place, gradient) for each weight that has a gradient."""
        for place, each in zip(self.gradients.values(), found, strict=True):
            if each is not None:
                yield place, each

    def _by_name(self, value: Tensor) -> Tensors:
        """Return views of one of the optimiser's tensors, by weight."""
        if value.ndim == 0:  # a count of steps
            return dict.fromkeys(self.gradients, value)
        return Packed(self.gradients.layout, {value.dtype: value})


def make_optimizer(weights: Iterable[Tensor], config: TrainConfig, method: Method) -> torch.optim.Optimizer:
    """Create the local optimiser for some weights, such that a CUDA graph can capture it."""
    weights = list(weights)
    own: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(weights, momentum=config.momentum, **own)
    betas = config.betas or method.learner.betas or (0.9, 0.999)
    return torch.optim.AdamW(weights, betas=betas, capturable=any(weight.is_cuda for weight in weights), **own)


def bind(model: nn.Module, packed: Packed) -> nn.Module:
    """Make a model's weights and buffers views of the packed ones of the same names, and return the model.

    Parameters stay the same objects with other memory (`data`), so every reference to one sees the vector's changes.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for leaf, weight in module._parameters.items():
            if weight is not None and prefix + leaf in packed:
                weight.data = packed[prefix + leaf]
        for leaf in module._buffers:
            if prefix + leaf in packed:
                module._buffers[leaf] = packed[prefix + leaf]
    return model


def added(terms: Tensors) -> Tensor:
    """Return the sum of losses."""
    return reduce(torch.add, terms.values())
