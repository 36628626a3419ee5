"""Stopping a run whose numbers are no longer finite."""

import torch

from fednca.errors import RunFailedError
from fednca.packed import Packed


def check_finite(tensors: dict[str, torch.Tensor], where: str) -> None:
    """Stop the run when a tensor that travels is no longer finite."""
    whole = tensors.vectors if isinstance(tensors, Packed) and tensors.follows(tensors.layout) else tensors
    floats = [tensor for tensor in whole.values() if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return
    if bool(torch.stack([norm.double() for norm in torch._foreach_norm(floats)]).isfinite().all()):
        return
    for name, tensor in tensors.items():  # a norm may be too large for a float where no number is
        if not bool(torch.isfinite(tensor).all()):
            raise RunFailedError(f"{where}: '{name}' is not finite; try a smaller learning rate or clip_norm")
