"""The simplex equiangular tight frame (ETF): fixed class vectors that are as far apart as possible."""

import math
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
    """Return C unit vectors in R^d whose pairwise inner products are all -1/(C-1), the lowest possible.

    Returns: (C, d), one class vector (prototype) per row.

    >>> M = simplex_etf(3, 8)
    >>> torch.round(M @ M.T, decimals=4)
    tensor([[ 1.0000, -0.5000, -0.5000],
            [-0.5000,  1.0000, -0.5000],
            [-0.5000, -0.5000,  1.0000]])
    """
    if num_classes < 2:
        raise FedncaError(
            f"an ETF (class vectors as far apart as possible) of {num_classes} classes in {dim} dimensions "
            "does not exist; use 2 or more classes"
        )
    if dim < num_classes:
        raise FedncaError(
            f"an ETF (class vectors as far apart as possible) of {num_classes} classes does not fit in {dim} "
            f"dimensions; use a backbone with at least {num_classes} channels"
        )
    axes = torch.eye(num_classes, dim, dtype=torch.float64)
    U = axes if basis == "axes" else orthonormal_rows(num_classes, dim, seed, "etf", torch.float64)
    # M = sqrt(C/(C-1)) U (I - 11ᵀ/C), here with rows for columns: subtracting the mean row multiplies by I - 11ᵀ/C.
    return (math.sqrt(num_classes / (num_classes - 1)) * (U - U.mean(dim=0))).to(dtype)


def orthonormal_rows(count: int, dim: int, seed: int, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random unit rows that are pairwise orthogonal, (count, d), computed in float64 from a seed.

    >>> rows = orthonormal_rows(2, 5, 0, "example")
    >>> torch.allclose(rows @ rows.T, torch.eye(2), atol=1e-6)
    True
    """
    if dim < count:
        raise FedncaError(
            f"{count} orthonormal vectors do not fit in {dim} dimensions; use a backbone with at least {count} channels"
        )
    Q, R = np.linalg.qr(numpy_rng(seed, purpose).standard_normal((dim, count)))
    # QR is unique only up to the signs of R's diagonal, which differ between linear-algebra libraries.
    return torch.tensor((Q * np.sign(np.diag(R))).T, dtype=dtype)
