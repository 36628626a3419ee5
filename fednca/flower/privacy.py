"""Differential privacy with Flower's own clipping, noise and accountant.

It protects a whole site's influence on the trainable weights. The epsilon does not cover BatchNorm's statistics, which
are averaged without noise, nor histograms, losses and counts. In both modes the noise has a standard deviation of
`noise_multiplier` times the most that one site can change: in `central` one site can move the average by
clip_norm / sites; in `local` any two updates of a site are at most 2·clip_norm apart.
"""

from collections.abc import Iterable, Sequence

import torch
from flwr import serverapp
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace, compute_clip_model_update, compute_stdv

from fednca.base.errors import FedncaError
from fednca.config import Config
from fednca.flower.config import PrivacyConfig
from fednca.methods.contract import Method, Tensors


def check_private(privacy: PrivacyConfig, config: Config, method: Method) -> None:
    """Refuse a run in which a site would send more than the noise covers."""
    if privacy.mode == "none":
        return
    name = config.method.name
    if method.rule.copies:
        raise FedncaError(
            f"method '{name}' uploads {method.about.state} beside the weights, which clipping and noise do not cover; "
            "use fedavg, fedprox or another method without such uploads, or privacy mode 'none'"
        )
    if method.closing is not None:
        raise FedncaError(
            f"method '{name}' ends with exact sums over each site's images, which the noise does not cover; "
            "use another method, or privacy mode 'none'"
        )
    if config.train.weighting != "equal":
        raise FedncaError(
            "weighting 'samples' lets a large site move the average by more than the noise covers; "
            "set train.weighting to 'equal', or privacy mode to 'none'"
        )


def privatize_update(privacy: PrivacyConfig, start: Tensors, weights: Tensors, trainable: Iterable[str]) -> Tensors:
    """Return a site's weights with their change clipped and, in mode `local`, noised; buffers stay as they are."""
    if privacy.mode == "none":
        return weights
    names = list(trainable)
    before, after = ([each[name].detach().cpu().numpy() for name in names] for each in (start, weights))
    if any((a != b).any() for a, b in zip(before, after, strict=True)):
        compute_clip_model_update(after, before, privacy.clip_norm)
    else:  # Flower divides by the norm of the change
        after = [array.copy() for array in after]
    if privacy.mode == "local":
        add_gaussian_noise_inplace(after, local_deviation(privacy))
    return weights | {name: torch.from_numpy(array).to(weights[name]) for name, array in zip(names, after, strict=True)}


def local_deviation(privacy: PrivacyConfig) -> float:
    """Return the standard deviation of the noise that a site adds to each weight: 0 unless the mode is `local`."""
    return privacy.noise_multiplier * 2 * privacy.clip_norm if privacy.mode == "local" else 0.0


def noise_average(privacy: PrivacyConfig, updates: Sequence[Tensors], trainable: Iterable[str]) -> list[Tensors]:
    """Add the same noise to each update, and so to their average, as mode `central` wants."""
    names = list(trainable)
    noise = [torch.zeros_like(updates[0][name]).numpy() for name in names]
    add_gaussian_noise_inplace(noise, compute_stdv(privacy.noise_multiplier, privacy.clip_norm, len(updates)))
    drawn = {name: torch.from_numpy(array) for name, array in zip(names, noise, strict=True)}
    return [weights | {name: weights[name] + each for name, each in drawn.items()} for weights in updates]


def epsilon_after(privacy: PrivacyConfig, releases: int) -> float:
    """Return the epsilon after this many releases, from Flower's accountant of Rényi differential privacy."""
    if not releases:
        return 0.0
    relation, sampling = serverapp.NeighboringRelation.ADD_OR_REMOVE_ONE, serverapp.SamplingMethod.NO_AMPLIFICATION
    try:
        accountant = serverapp.RdpAccountant(serverapp.PrivacyConfig(privacy.delta, 1, relation, sampling))
    except ImportError:
        raise FedncaError("the epsilon of a private run needs dp-accounting; pip install 'fednca[flower]'") from None
    event = serverapp.GaussianPrivacyEvent(privacy.noise_multiplier, sample_size=1, population_size=1)
    accountant.compose(event, releases)
    return accountant.get_epsilon(privacy.delta)
