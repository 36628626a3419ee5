"""The simplex equiangular tight frame: one fixed prototype per class, the same on every client."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fednca.errors import FedncaError
from fednca.randomness import numpy_rng


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
            f"a simplex ETF of {num_classes} classes does not fit in {dim} dimensions; "
            f"use a backbone with at least {num_classes} channels"
        )
    U = np.eye(dim, num_classes) if basis == "axes" else _random_basis(num_classes, dim, seed)
    # M = sqrt(C/(C-1)) U (I - 11ᵀ/C), transposed; subtracting the mean column is the product with I - 11ᵀ/C
    M = np.sqrt(num_classes / (num_classes - 1)) * (U - U.mean(axis=1, keepdims=True)).T
    return torch.tensor(M, dtype=dtype)


def _random_basis(num_classes: int, dim: int, seed: int) -> np.ndarray:
    """Return a seeded (d, C) matrix with orthonormal columns."""
    Q, R = np.linalg.qr(numpy_rng(seed, "etf").standard_normal((dim, num_classes)))
    # QR is unique only up to the signs of R's diagonal, which differ between linear-algebra libraries
    return Q * np.sign(np.diag(R))
