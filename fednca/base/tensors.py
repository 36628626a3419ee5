"""Named tensors packed one after another in a few vectors, so that all are copied or added in one operation."""

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fednca.base.errors import RunFailedError

ALIGNMENT = 64  # numbers; kernels read several at once, so each tensor must begin at a multiple


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@dataclass(frozen=True)
class Layout:
    """The order and shapes of tensors in the vectors of their dtypes; 4-D tensors are stored channels last."""

    places: tuple[tuple[str, torch.dtype, torch.Size], ...]
    alignment: int = ALIGNMENT  # each tensor begins at a multiple of so many numbers; with 1, there are no gaps

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], first: Iterable[str] = (), alignment: int = ALIGNMENT) -> Self:
        """Lay out tensors in order, those named in `first` before the others."""
        names = dict.fromkeys([*first, *tensors])
        return cls(tuple((name, tensors[name].dtype, tensors[name].shape) for name in names), alignment)

    @classmethod
    def from_json(cls, text: str, alignment: int = ALIGNMENT) -> Self:
        """Read a layout that `to_json` wrote; any other text raises an exception."""
        places = tuple((str(name), DTYPES[dtype], torch.Size(shape)) for name, dtype, shape in json.loads(text))
        if len({name for name, _, _ in places}) < len(places):
            raise ValueError("two tensors have the same name")
        if any(side < 0 for _, _, shape in places for side in shape):
            raise ValueError("a shape has a negative side")
        return cls(places, alignment)

    def to_json(self) -> str:
        """Write name, dtype and shape of each tensor, but not the alignment."""
        return json.dumps([(name, dtype_name(dtype), list(shape)) for name, dtype, shape in self.places])

    @cached_property
    def lengths(self) -> dict[torch.dtype, list[int]]:
        """The lengths of the pieces of each dtype's vector: a tensor, a gap, a tensor, a gap, …"""
        found: dict[torch.dtype, list[int]] = {}
        for _, dtype, shape in self.places:
            length = math.prod(shape)  # exact, however large; torch's own product runs over
            found.setdefault(dtype, []).extend([length, -length % self.alignment])
        return found

    def check(self, vectors: Mapping[torch.dtype, Tensor]) -> None:
        """Raise ValueError unless there is one vector for each dtype, exactly as long as the tensors need."""
        found = {key: (vector.dtype, tuple(vector.shape)) for key, vector in vectors.items()}
        if found != {dtype: (dtype, (sum(each),)) for dtype, each in self.lengths.items()}:
            raise ValueError("the layout does not fit the numbers")


class Packed(dict[str, Tensor]):
    """A dict of tensors, each a view of one of the `vectors`; if an entry is replaced, it is an ordinary dict again."""

    def __init__(self, layout: Layout, vectors: dict[torch.dtype, Tensor]) -> None:
        pieces = {dtype: iter(torch.split(vectors[dtype], each)[::2]) for dtype, each in layout.lengths.items()}
        super().__init__((name, view(next(pieces[dtype]), shape)) for name, dtype, shape in layout.places)
        self.layout, self.vectors, self.views = layout, vectors, tuple(self.values())

    def follows(self, layout: Layout) -> bool:
        """Return whether the vectors hold the dict's tensors in this layout."""
        unchanged = len(self) == len(self.views) and all(map(operator.is_, self.values(), self.views))
        return unchanged and self.layout == layout

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device) -> Self:
        """Return the tensors of a layout, all zero."""
        lengths = layout.lengths.items()
        return cls(layout, {dtype: torch.zeros(sum(each), dtype=dtype, device=device) for dtype, each in lengths})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the same names and shapes into this one."""
        if isinstance(tensors, Packed) and tensors.follows(self.layout):
            for dtype, vector in self.vectors.items():
                vector.copy_(tensors.vectors[dtype])
        elif self:
            torch._foreach_copy_(list(self.values()), [tensors[name] for name in self])

    def clone(self) -> "Packed":
        """Copy the vectors."""
        return Packed(self.layout, {dtype: vector.clone() for dtype, vector in self.vectors.items()})


def join(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors to one vector, without gaps."""
    return torch.cat([flat(each) for each in tensors])


def flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as a vector, 4-D ones channels last, as models store them."""
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).flatten()


def view(piece: Tensor, shape: torch.Size) -> Tensor:
    """View a piece of a vector as a tensor of this shape; a 4-D one is channels last, as convolutions need it."""
    if len(shape) != 4:
        return piece.view(shape)
    return piece.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Stop the run if a tensor is not finite."""
    whole = tensors.vectors if isinstance(tensors, Packed) and tensors.follows(tensors.layout) else tensors
    floats = [tensor for tensor in whole.values() if tensor.is_floating_point() and tensor.numel()]
    if not floats or bool(torch.stack([norm.double() for norm in torch._foreach_norm(floats)]).isfinite().all()):
        return
    for name, tensor in tensors.items():  # a norm may overflow although every number is finite
        if not bool(torch.isfinite(tensor).all()):
            raise RunFailedError(f"{where}: '{name}' is not finite; try a smaller learning rate or clip_norm")
