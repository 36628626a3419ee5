"""Squared gradients of convolutions on a GPU against a loop over samples, at the sizes of a training."""

import pytest
import torch
from fisher_cases import fisher_diagonal, local_of, resnet_on_gpu
from squares_cases import CASES, Case, expected
from stem_cases import assert_within

from fednca import fisher
from fednca.engine.kernels import squares

pytestmark = pytest.mark.gpu
ACCUMULATION = 1e-5  # of long sums in float32, which tensor cores cut off instead of rounding
ONE, TWO, NONE = (1, 1), (2, 2), (0, 0)
REAL = {
    "224 px, first": Case((6, 3, 224, 224), 64, (7, 7), TWO, (3, 3)),
    "224 px, 64 channels": Case((9, 64, 56, 56), 64),
    "224 px, to 128 channels": Case((7, 64, 56, 56), 128, stride=TWO),
    "224 px, shortcut to 256 channels": Case((17, 128, 28, 28), 256, ONE, TWO, NONE),
    "224 px, 512 channels": Case((33, 512, 7, 7), 512),
    "64 px, 512 channels": Case((33, 512, 2, 2), 512),
    "odd channels": Case((9, 72, 29, 31), 200),
    "wide": Case((3, 32, 5, 300), 48, (1, 7), padding=(0, 3)),
}


@pytest.mark.parametrize("name", [*REAL, *CASES])
def test_squared_gradients_are_those_of_a_loop_over_samples_and_repeat_themselves(name):
    case = (CASES | REAL)[name]
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds NaN
    try:
        found = squares.squares(*case.given("cuda"), *case.shape)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_within(found, *expected(case, "cuda"), ACCUMULATION, ACCUMULATION)
    assert torch.equal(squares.squares(*case.given("cuda"), *case.shape), found)


@pytest.mark.parametrize("programs", [1, 37, 10_000])
def test_squared_gradients_do_not_depend_on_how_the_samples_are_shared(programs, monkeypatch):
    monkeypatch.setattr(squares, "PROGRAMS", programs)
    case = REAL["224 px, 64 channels"]
    found = squares.squares(*case.given("cuda"), *case.shape)
    assert_within(found, *expected(case, "cuda"), ACCUMULATION, ACCUMULATION)


@pytest.mark.parametrize("name", REAL)
def test_a_kernel_compiled_once_serves_batches_of_every_size(name, monkeypatch):
    case = REAL[name]
    x, g = case.given("cuda")
    squares.warm_up(x.shape[1:], g.shape[1:], case.shape, x.device)
    monkeypatch.setattr(squares._square, "compile", None)  # whoever calls it fails
    parts = [squares.squares(x[cut], g[cut], *case.shape) for cut in (slice(0, 1), slice(1, 2), slice(2, None))]
    torch.testing.assert_close(sum(parts), squares.squares(x, g, *case.shape), rtol=1e-5, atol=0)


def test_the_fisher_diagonal_of_a_network_takes_them(monkeypatch):
    learner, model, images, labels = resnet_on_gpu()
    local = local_of(model)
    assert fisher.layers_tell(local)

    def diagonal():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return fisher_diagonal(learner, local, [(images[:16], labels[:16]), (images[16:], labels[16:])])

    taken, by_kernel = [], squares.squares
    monkeypatch.setattr(squares, "squares", lambda *given: taken.append(len(given[0])) or by_kernel(*given))
    found = diagonal()
    assert [taken.count(samples) for samples in (16, 5)] == [20, 20]  # all convolutions
    monkeypatch.setattr(fisher, "squares_by_kernel", lambda *_: None)
    for name, reference in diagonal().items():
        assert float((found[name] - reference).norm()) < 0.02 * float(reference.norm()), name
