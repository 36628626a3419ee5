"""What L_Neg can come to, against a global optimiser and the losses themselves."""

import numpy as np
import pytest
import torch
from plan import GRID, Entry
from reading import tables
from rejection import least
from scipy.optimize import differential_evolution

from fednca.measures.losses import objective
from fednca.models.heads import Output


def losses_of(products, weight):
    """BCE and L_Neg of an image with two of four classes, absent ones having these products with the other vectors."""
    A = torch.full((1, 4, 4), -50 / 3, dtype=torch.float64)
    for row in range(4):
        A[0, row, row] = 50.0
    for absent in (2, 3):
        A[0, absent, torch.arange(4) != absent] = torch.tensor(products)
        A[0, absent, absent] = -sum(products)
    labels = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    output = Output(A.diagonal(dim1=1, dim2=2), A, A)
    return sum(objective(output, labels, lambda1=weight, lambda2=0.0).values()).item()


@pytest.mark.parametrize("weight", [0.02, 0.5, 1.0, 20.0])  # with the last, L_Neg is met
def test_the_least_is_what_a_global_optimiser_finds(weight):
    found = differential_evolution(losses_of, [(-8, 8)] * 3, args=(weight,), seed=0, tol=1e-10)
    assert least(4, weight, 0.3).value == pytest.approx(found.fun, abs=2e-3)
    own = 1 / (1 + np.exp(found.x.sum()))
    assert least(4, weight, 0.3).probability == pytest.approx(own, abs=0.02)


def test_the_table_holds_means_of_losses(whole, complete):
    (header, rows) = tables(whole[0], "### Can L_Neg be met?")[0]
    assert header[3:6] == ["BCE", "λ1·L_Neg", "sum"]
    shown = {(row[0], row[1]): row for row in rows}
    own = [complete[Entry(s, "fednca-ml", draw, 0, 50).path]["losses"] for s in GRID for draw in range(3)]
    bce, rejection = (np.mean([losses[term] for losses in own]) for term in ("bce", "neg"))
    row = shown["digits, 50 rounds", "fednca-ml"]
    assert [float(cell) for cell in row[2:6]] == pytest.approx([1, bce, rejection, bce + rejection], abs=5e-4)
    assert row[-1] == "18"
    assert ("cifar10-0.5", "fednca-ml:lambda2=0") in shown
