"""The empirical Fisher diagonal of a local loss: the squared gradients of each sample's loss, averaged over samples.

The gradients of n samples take n times the memory of the model. If all trained weights are those of convolutions,
linear layers and BatchNorms, one backward pass over a batch gives every layer what it needs to square its own
gradients. Any other model is differentiated sample by sample, a few at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fednca.base.errors import RunFailedError
from fednca.base.randomness import GLOBAL
from fednca.models.heads import Classifier, Output

HELD = 1 << 26  # numbers in the per-sample gradients held at once, each gradient as large as the model
MOST = 32  # samples at once, however small the model

Tensors = dict[str, Tensor]
Losses = Callable[[nn.Module, Tensor, Tensor], Tensors]  # terms of a model's loss on images and labels
Forward = Callable[[Tensor], Tensor]
Squares = Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]  # of a layer, by its input and output's gradient


def fisher_sums(losses: Losses, model: nn.Module, trained: Tensors, images: Tensor, labels: Tensor) -> Tensors:
    """Return each trained weight's squared per-sample gradients of a loss, summed over a batch, by name."""
    model.eval()  # BatchNorm would mix the samples
    weights = {name: weight.detach() for name, weight in trained.items()}
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    add = add_by_layers if layers_suffice(model, weights) else add_by_samples
    add(totals, losses, model, weights, images, labels)
    return totals


# -- any model -----------------------------------------------------------------------------------------------------


class LocalLoss(nn.Module):
    """A loss as a module, which `functional_call` can evaluate at other weights."""

    def __init__(self, losses: Losses, model: nn.Module) -> None:
        """Take the loss and the model that is trained on it."""
        super().__init__()
        self.losses, self.model = losses, model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the loss's terms."""
        terms = self.losses(self.model, images, labels)
        return torch.stack(list(terms.values())).sum()


def add_by_samples(
    totals: Tensors, losses: Losses, model: nn.Module, weights: Tensors, images: Tensor, labels: Tensor
) -> None:
    """Add the squared gradients of a batch's samples by differentiating the whole model for each one."""
    loss = LocalLoss(losses, model)

    def loss_of_one(weights: Tensors, image: Tensor, label: Tensor) -> Tensor:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        value: Tensor = functional_call(loss, named, (image[None], label[None]))
        return value

    gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    at_once = min(MOST, max(1, HELD // sum(weight.numel() for weight in weights.values())))
    # In float32: BatchNorm in bf16 cannot be mapped over samples on a CPU, and squares want the digits.
    with plain_attention(), torch.autocast(images.device.type, enabled=False):
        for some in zip(torch.split(images, at_once), torch.split(labels, at_once), strict=True):
            for name, each in gradients(weights, *some).items():
                totals[name] += each.square().sum(0)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention use elementary operations only, since its fused kernels cannot be mapped over samples."""
    with GLOBAL:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


# -- layer by layer ------------------------------------------------------------------------------------------------


def layers_suffice(model: nn.Module, weights: Tensors) -> bool:
    """Return whether all trained weights belong to layers that can square their own gradients."""
    return isinstance(model, Classifier) and all(squares_of(layer) for layer in trained_layers(model, weights).values())


def trained_layers(model: nn.Module, weights: Tensors) -> dict[str, nn.Module]:
    """Return the layers that own trained weights, by name."""
    return {path: model.get_submodule(path) for path in {name.rpartition(".")[0] for name in weights}}


def squares_of(layer: nn.Module) -> Squares | None:
    """Return the function that squares a layer's gradients, or None if there is none."""
    if type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        return None if isinstance(layer.padding, str) else squares_of_convolution
    return {nn.Linear: squares_of_linear, nn.BatchNorm2d: squares_of_batch_norm}.get(type(layer))


def squares_of_convolution(layer: nn.Module, x: Tensor, δ: Tensor) -> dict[str, Tensor]:
    """Sum over samples the squares of Σ_s δ_s·patch_s; x: (B, Cin, H, W), δ: (B, Cout, H', W')."""
    assert isinstance(layer, nn.Conv2d)
    patches = patches_of(layer, x.to(δ.dtype), δ.shape[2:])
    gradients = δ.flatten(2) @ patches.flatten(3).flatten(1, 2)  # (B, Cout, R·S·Cin)
    weight = sum_of_squares(gradients).view(len(layer.weight), *layer.kernel_size, layer.in_channels)
    squares = {"weight": weight.permute(0, 3, 1, 2)}
    if layer.bias is not None:
        squares["bias"] = sum_of_squares(δ.sum(dim=(2, 3), dtype=at_least_float(δ)))
    return squares


def patches_of(layer: nn.Conv2d, x: Tensor, size: torch.Size) -> Tensor:
    """View what a convolution sees of x (B, Cin, H, W) at each position of its output: (B, H', W', R, S, Cin).

    `F.unfold` copies one sample after the other; this copies all at once, in channels-last order like x.
    """
    assert not isinstance(layer.padding, str)
    (top, left), (down, right), (r, s) = layer.padding, layer.stride, layer.dilation
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top)).contiguous()
    sample, row, column, channel = padded.stride()
    strides = (sample, down * row, right * column, r * row, s * column, channel)
    return padded.as_strided((len(x), *size, *layer.kernel_size, x.shape[1]), strides)


def squares_of_linear(layer: nn.Module, x: Tensor, δ: Tensor) -> dict[str, Tensor]:
    """Sum over samples the squares of Σ_s δ_s·x_sᵀ and of Σ_s δ_s; x: (B, …, in), δ: (B, …, out)."""
    if δ.ndim > 2:  # a layer on several tokens of a sample
        x, δ = x.flatten(1, -2).to(δ.dtype), δ.flatten(1, -2)
        return {"weight": sum_of_squares(δ.mT @ x), "bias": sum_of_squares(δ.sum(dim=1, dtype=at_least_float(δ)))}
    δ2, x2 = (each.to(at_least_float(each)).square() for each in (δ, x))
    return {"weight": (δ2[:, :, None] * x2[:, None, :]).sum(0), "bias": δ2.sum(0)}


def squares_of_batch_norm(layer: nn.Module, x: Tensor, δ: Tensor) -> dict[str, Tensor]:
    """Sum over samples the squares of Σ_s δ_s·x̂_s and of Σ_s δ_s, with fixed statistics; both (B, C, H, W)."""
    assert isinstance(layer, nn.BatchNorm2d)
    x_hat = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
    dtype = at_least_float(δ)
    return {
        "weight": sum_of_squares((δ * x_hat).sum(dim=(2, 3), dtype=dtype)),
        "bias": sum_of_squares(δ.sum(dim=(2, 3), dtype=dtype)),
    }


def sum_of_squares(gradients: Tensor) -> Tensor:
    """Return Σ_i g_i² over the first dimension, without a copy in higher precision."""
    dtype = at_least_float(gradients)
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=0, dtype=dtype)
    return norms.square()


def at_least_float(tensor: Tensor) -> torch.dtype:
    """Return the dtype for sums: the tensor's own, but at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def add_by_layers(
    totals: Tensors, losses: Losses, model: nn.Module, weights: Tensors, images: Tensor, labels: Tensor
) -> None:
    """Add the squared gradients of a batch's samples layer by layer, in one backward pass over the batch."""
    calls: list[str] = []
    first: list[Tensor] = []  # outputs of the layers that have no trained layer before them

    def call(path: str, layer: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        calls.append(path)
        output = forward(x)
        if not output.requires_grad:
            first.append(output.requires_grad_())
            output = output.clone()  # the model may overwrite this one
        x, version, squares = x.detach(), x._version, squares_of(layer)
        assert squares is not None

        def on_gradient(δ: Tensor) -> None:
            if x._version != version:
                raise RunFailedError(f"the Fisher diagonal needs the input of '{path}', which was overwritten")
            for leaf, square in squares(layer, x, δ).items():
                if f"{path}.{leaf}" in totals:
                    totals[f"{path}.{leaf}"] += square

        output.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return output

    with ExitStack() as stack, torch.enable_grad():
        for path, layer in trained_layers(model, weights).items():
            stack.enter_context(instead(layer, partial(call, path, layer, layer.forward)))
        output = functional_call(model, weights, (images,))
    if len(calls) > len(set(calls)):  # a layer's gradient is the sum over its calls
        add_by_samples(totals, losses, model, weights, images, labels)
        return
    found = gradients_of_losses(losses, output, images, labels)
    reached = [(at, δ) for at, δ in zip((output.logits, output.features), found, strict=True) if at.requires_grad]
    torch.autograd.grad([at for at, _ in reached], first, [δ for _, δ in reached], allow_unused=True)


@contextmanager
def instead(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Replace a module's forward pass for the length of a block."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def gradients_of_losses(losses: Losses, output: Output, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of every sample's own loss with respect to its logits and its features."""

    def loss_of_one(logits: Tensor, features: Tensor, image: Tensor, label: Tensor) -> Tensor:
        given = Given(Output(logits[None], None, features[None]))
        terms = losses(given, image[None], label[None])
        return torch.stack(list(terms.values())).sum()

    each = vmap(grad(loss_of_one, argnums=(0, 1)), randomness="different")
    found: tuple[Tensor, Tensor] = each(output.logits.detach(), output.features.detach(), images, labels)
    return found


class Given(nn.Module):
    """A model whose output is already known."""

    def __init__(self, output: Output) -> None:
        """Take the output."""
        super().__init__()
        self.output = output

    def forward(self, images: Tensor) -> Output:
        """Return the known output."""
        return self.output
