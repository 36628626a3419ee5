"""The one-label case against Flower's partitioner, an implementation that is not ours."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from fednca.data.partition import dirichlet_presence, summary

SEEDS, CLIENTS, CLASSES, EACH = 200, 5, 4, 250
BETAS = (0.1, 0.5)
TARGETS = np.repeat(np.arange(CLASSES), EACH)


def our_shares(beta):
    """Share of each class that each client gets: (seeds, C, K)."""
    labels = np.eye(CLASSES, dtype=np.int8)[TARGETS]
    dealt = (dirichlet_presence(labels, CLIENTS, beta, 1.0, seed, min_samples=0, draws=1) for seed in range(SEEDS))
    return np.stack([summary(partition, labels).T / EACH for partition in dealt])


def flower_shares(beta):
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    dataset = Dataset.from_dict({"label": TARGETS})
    shares = np.empty((SEEDS, CLASSES, CLIENTS))
    for seed in range(SEEDS):
        partitioner = DirichletPartitioner(
            CLIENTS, "label", beta, min_partition_size=0, self_balancing=False, shuffle=False, seed=seed
        )
        partitioner.dataset = dataset
        for k in range(CLIENTS):
            own = np.asarray(partitioner.load_partition(k)[:]["label"], int)
            shares[seed, :, k] = np.bincount(own, minlength=CLASSES) / EACH
    return shares


@pytest.fixture(scope="module")
def flower():
    return {beta: flower_shares(beta) for beta in BETAS}


def gaps(ours, theirs):
    """Compare per client, over seeds and classes: differences of mean and variance in standard errors, KS p-value."""
    a, b = (shares.reshape(-1, CLIENTS) for shares in (ours, theirs))
    n = len(a)

    def squared_error_of_variance(shares):
        fourth = ((shares - shares.mean(axis=0)) ** 4).mean(axis=0)
        return (fourth - shares.var(axis=0) ** 2) / n

    mean = (a.mean(axis=0) - b.mean(axis=0)) / np.sqrt((a.var(axis=0) + b.var(axis=0)) / n)
    spread = np.sqrt(squared_error_of_variance(a) + squared_error_of_variance(b))
    variance = (a.var(axis=0) - b.var(axis=0)) / spread
    return mean, variance, ks_2samp(a, b, axis=0).pvalue


@pytest.mark.parametrize("beta", BETAS)
def test_client_shares_agree_with_flower_in_mean_and_variance(flower, beta):
    # Two comparisons of 5 clients: 3.5 standard errors are exceeded by chance once in about 200 such tests.
    mean, variance, _ = gaps(our_shares(beta), flower[beta])
    assert np.abs(mean).max() < 3.5
    assert np.abs(variance).max() < 3.5


def test_client_shares_have_flowers_distribution(flower):
    """Not at 0.1: there most shares are near 0, where we draw a count and Flower cuts fractions off."""
    assert gaps(our_shares(0.5), flower[0.5])[2].min() > 0.001


@pytest.mark.parametrize("beta", BETAS)
def test_both_have_the_variance_of_the_dirichlet_distribution(flower, beta):
    """Var p = m (1 - m) / (K beta + 1) with m = 1 / K; drawing n images at random adds (m (1 - m) - Var p) / n."""
    even = 1 / CLIENTS
    expected = even * (1 - even) / (CLIENTS * beta + 1)
    drawn = expected + (even * (1 - even) - expected) / EACH
    assert our_shares(beta).var(axis=(0, 1)).mean() == pytest.approx(drawn, rel=0.1)
    assert flower[beta].var(axis=(0, 1)).mean() == pytest.approx(expected, rel=0.1)


def test_the_comparison_notices_another_beta(flower):
    _, variance, p = gaps(our_shares(0.8), flower[0.5])
    assert np.abs(variance).max() > 3.5
    assert p.min() < 0.001
