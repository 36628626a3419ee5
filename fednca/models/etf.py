"""The simplex equiangular tight frame: one fixed prototype per class, the same on every client."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fednca.base.errors import FedncaError
from fednca.base.randomness import numpy_rng


def simplex_etf(
    num_classes: int,
    dim: int,
    seed: int = 0,
    *,
    basis: Literal["random", "axes"] = "random",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return C unit vectors in R^d whose pairwise inner products are all -1/(C-1).

    Returns: (C, d), prototypes as rows.

    >>> M = simplex_etf(3, 8)
    >>> torch.round(M @ M.T, decimals=4)
    tensor([[ 1.0000, -0.5000, -0.5000],
            [-0.5000,  1.0000, -0.5000],
            [-0.5000, -0.5000,  1.0000]])
    """
    if num_classes < 2:
        raise FedncaError(f"a simplex ETF of {num_classes} classes in {dim} dimensions does not exist; use 2 or more")
    if dim < num_classes:
        raise FedncaError(
            f"a simplex ETF of {num_classes} classes is made of as many orthonormal vectors, too many for {dim} "
            f"dimensions; use a backbone with at least {num_classes} channels"
        )
    axes = torch.eye(num_classes, dim, dtype=torch.float64)
    U = axes if basis == "axes" else orthonormal_rows(num_classes, dim, seed, "etf", torch.float64)
    # M = sqrt(C/(C-1)) U (I - 11ᵀ/C), here transposed: subtracting the mean row is the product with I - 11ᵀ/C
    return (math.sqrt(num_classes / (num_classes - 1)) * (U - U.mean(dim=0))).to(dtype)


def orthonormal_rows(count: int, dim: int, seed: int, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return seeded random rows of length 1 that are pairwise orthogonal: (count, d), made in float64.

    >>> rows = orthonormal_rows(2, 5, 0, "example")
    >>> torch.allclose(rows @ rows.T, torch.eye(2), atol=1e-6)
    True
    """
    if dim < count:
        raise FedncaError(
            f"{count} orthonormal vectors do not fit in {dim} dimensions; use a backbone with at least {count} channels"
        )
    Q, R = np.linalg.qr(numpy_rng(seed, purpose).standard_normal((dim, count)))
    # QR is unique only up to the signs of R's diagonal, which differ between linear-algebra libraries
    return torch.tensor((Q * np.sign(np.diag(R))).T, dtype=dtype)
