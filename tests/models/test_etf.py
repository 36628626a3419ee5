import pytest
import torch
from torch.testing import assert_close

from fednca.errors import FedncaError
from fednca.models.etf import orthonormal_rows, simplex_etf
from fednca.randomness import numpy_rng


@pytest.mark.parametrize("basis", ["random", "axes"])
@pytest.mark.parametrize("num_classes", range(2, 101))
def test_gram_matrix_is_the_closed_form(num_classes, basis):
    C = num_classes
    M = simplex_etf(C, 128, seed=C, basis=basis).double()
    expected = (C * torch.eye(C) - torch.ones(C, C)).double() / (C - 1)
    assert_close(M @ M.T, expected, atol=1e-6, rtol=0)


def test_prototypes_sum_to_zero_even_when_they_fill_the_space():
    assert_close(simplex_etf(8, 8, dtype=torch.float64).sum(dim=0), torch.zeros(8, dtype=torch.float64))


def test_axes_basis_spans_the_first_axes_only():
    M = simplex_etf(3, 8, basis="axes")
    assert_close(M[:, :3] * (2 / 3) ** 0.5, torch.eye(3) - 1 / 3)
    assert not M[:, 3:].any()


def test_seed_decides_the_prototypes():
    assert torch.equal(simplex_etf(5, 16, seed=1), simplex_etf(5, 16, seed=1))
    assert not torch.allclose(simplex_etf(5, 16, seed=1), simplex_etf(5, 16, seed=2), atol=0.1)


def test_dtype_is_the_one_asked_for():
    exact = simplex_etf(5, 16, dtype=torch.float64)
    assert exact.dtype == torch.float64
    assert torch.equal(exact.float(), simplex_etf(5, 16))


@pytest.mark.parametrize(("num_classes", "dim"), [(20, 16), (1, 16), (0, 16)])
def test_impossible_sizes_are_named(num_classes, dim):
    with pytest.raises(FedncaError, match=rf"{num_classes} classes.* {dim} dimensions"):
        simplex_etf(num_classes, dim)


def test_the_sign_of_a_direction_does_not_depend_on_the_machine():
    """By Gram and Schmidt a direction's product with the vector it is made of is positive; LAPACK has either sign."""
    rows = orthonormal_rows(3, 4, 0, "etf", torch.float64)
    drawn = torch.from_numpy(numpy_rng(0, "etf").standard_normal((4, 3)))
    assert ((rows.T * drawn).sum(dim=0) > 0).all()


def test_axes_need_a_dimension_for_each_class():
    with pytest.raises(FedncaError, match="17 classes does not fit in 16 dimensions"):
        simplex_etf(17, 16, basis="axes")
