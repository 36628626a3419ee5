"""BatchNorm with fixed statistics and its squared gradients against torch's in float64, by triton's interpreter."""

import fisher_cases
import pytest
import torch
from fisher_cases import FROZEN, by_a_loop, network, norm_by_a_loop
from kernel_cases import EVALUATED, NORMS, assert_near
from stem_cases import interpret

from fednca import fisher
from fednca.engine import fuse, fused

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the interpreter cuts bits off, where a GPU rounds


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpret(tmp_path_factory.mktemp("interpreted") / "found.pt", fisher_cases.__file__)


@pytest.mark.parametrize("name", EVALUATED)
def test_output_gradient_and_squares_are_torchs_by_a_loop_over_samples(name, interpreted):
    case, found, expected = EVALUATED[name], interpreted["norm", name], norm_by_a_loop(EVALUATED[name])
    for each in ("y", "x"):  # which are rounded
        assert found[each].dtype == case.dtype
        assert found[each].is_contiguous(memory_format=torch.channels_last)
        assert_near({each: found.pop(each)}, {each: expected.pop(each)}, ROUNDING[case.dtype])
    assert all(each.dtype == torch.float32 for each in found.values())
    assert_near(found, expected, ROUNDING[torch.float32])


@pytest.mark.parametrize("frozen", FROZEN)
def test_the_fisher_diagonal_of_a_network_takes_them_where_they_are_trained(frozen, interpreted):
    found, layouts, norms_of_torch = interpreted["fisher", frozen]
    assert_near(found, by_a_loop(*network(frozen)), 1e-4)
    assert set(layouts) == {1}  # gradients come channels last, as the kernel of convolutions wants them
    assert norms_of_torch == (2 if frozen == "all before the last" else 0)


def test_what_a_gpu_cannot_compile_stays_torchs(monkeypatch):
    monkeypatch.setattr(fused, "DEVICE", "cpu")  # for which triton compiles nothing
    monkeypatch.setattr(fuse, "available", lambda: True)
    x = NORMS["one program"].tensors()[0].float()
    assert not fisher.kernels_take("fixed_norms", x)
    assert not fisher.kernels_take("pooling", x)
    monkeypatch.setattr(fuse, "compiles", lambda *_: True)
    assert fisher.kernels_take("fixed_norms", x)
    assert not fisher.kernels_take("fixed_norms", x.double())
    assert not fisher.kernels_take("fixed_norms", x.contiguous())
