"""BatchNorm with fixed statistics and its squared gradients on a GPU against torch's in float64."""

import pytest
import torch
from fisher_cases import fisher_diagonal, local_of, norm_by_a_loop, norm_by_kernel, resnet_on_gpu
from kernel_cases import EVALUATED, Map, assert_near

from fednca import fisher
from fednca.engine.kernels import fixed_norms, inference

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
CASES = EVALUATED | {
    "224 px, first": Map((6, 64, 112, 112), torch.bfloat16),
    "224 px, 128 channels": Map((9, 128, 28, 28), torch.bfloat16),
    "224 px, 512 channels": Map((33, 512, 7, 7), torch.bfloat16),
    "odd, bf16": Map((9, 200, 29, 31), torch.bfloat16),
    "far from zero, bf16": Map((5, 64, 28, 28), torch.bfloat16, mean=100),
}


@pytest.mark.parametrize("name", CASES)
def test_output_gradient_and_squares_are_torchs_by_a_loop_over_samples_and_repeat_themselves(name):
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds NaN
    try:
        found, again = (norm_by_kernel(CASES[name], "cuda") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    expected = norm_by_a_loop(CASES[name], "cuda")
    assert all(found[each].is_contiguous(memory_format=torch.channels_last) for each in ("y", "x"))
    maps = ({each: of.pop(each) for each in ("y", "x")} for of in (found, expected))
    assert_near(*maps, ROUNDING[CASES[name].dtype])
    assert_near(found, expected, 3e-5)


def test_a_kernel_compiled_once_serves_batches_of_every_size(monkeypatch):
    fixed_norms.warm_up(64, torch.bfloat16, torch.device("cuda", 0))
    for kernel in (fixed_norms._write_gradient, inference._write_normal):
        monkeypatch.setattr(kernel, "compile", None)  # whoever calls it fails
    for shape in ((1, 64, 1, 1), (2, 64, 16, 16), (3, 64, 7, 5)):
        norm_by_kernel(Map(shape, torch.bfloat16), "cuda")


def test_the_fisher_diagonal_of_a_network_takes_them_and_is_as_near_to_the_true_one(monkeypatch):
    learner, model, images, labels = resnet_on_gpu()

    def diagonal(enabled=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False):
            dtype = torch.float32 if enabled else torch.float64
            batches = [(images.to(dtype), labels.to(dtype))]
            return fisher_diagonal(learner, local_of(model.to(dtype)), batches)

    layouts, by_kernel = [], fisher.squares_by_kernel
    monkeypatch.setattr(
        fisher, "squares_by_kernel", lambda layer, x, δ: layouts.append(δ.stride(1)) or by_kernel(layer, x, δ)
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "batch_norm", None)  # whoever calls it fails
        patched.setattr(torch.nn.functional, "max_pool2d", None)
        found = diagonal()
    assert layouts == [1] * 20  # channels last: nothing is copied for the kernel of convolutions
    monkeypatch.setattr(fisher, "kernels_take", lambda *_: False)
    torchs, true = diagonal(), diagonal(enabled=False)
    for name, reference in true.items():
        apart, torchs_apart = (float((each[name] - reference).norm()) for each in (found, torchs))
        assert apart < 1.2 * torchs_apart + 0.01 * float(reference.norm()), name
