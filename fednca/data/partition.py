"""Deal images to clients, at random or by the site that they come from.

The random partition has two settings. gamma is the share of all classes that each client holds. beta is the Dirichlet
concentration of the shares in which a class's images go to its clients: the smaller, the more uneven.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError, unknown_name
from fednca.base.randomness import numpy_rng

Kind = Literal["dirichlet", "natural"]
"""The clients: with classes and shares drawn at random ("dirichlet"), or the sites that the data names ("natural")."""

Unmatched = Literal["drop", "mask", "loss-mask"]
"""What to do with an image if no client holds all its classes: leave it out, or mask the classes its client lacks."""

NOWHERE = "no client may hold this label set"
ELSEWHERE = "does not fit its group's client"

ATTEMPTS = 100


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds which image: every index is with one client, or left out for one reason.

    clients: K sorted index arrays; classes: (K, C), the classes C_k that client k holds; proportions: (C, K), the
    shares p_c in which the images of class c go to its clients; left_out: reason → sorted indices.
    """

    clients: tuple[NDArray[np.intp], ...]
    classes: NDArray[np.bool_]
    proportions: NDArray[np.float64]
    left_out: dict[str, NDArray[np.intp]]
    unmatched: Unmatched

    def client_labels(self, labels: NDArray[np.int8], k: int) -> NDArray[np.int8]:
        """Return the labels of client k's images as k sees them: present labels outside C_k become absent or unknown.

        labels: (N, C), of all images dealt → (n_k, C). They become absent with "mask" and unknown with "loss-mask".
        """
        own = labels[self.clients[k]]
        if self.unmatched != "drop":
            own[(own == 1) & ~self.classes[k]] = 0 if self.unmatched == "mask" else -1
        return own

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return plain arrays; `owner` is the client of each index, or -1 minus the reason's number."""
        owner = np.empty(sum(map(len, [*self.clients, *self.left_out.values()])), np.int32)
        for k, rows in enumerate(self.clients):
            owner[rows] = k
        for reason, rows in enumerate(self.left_out.values()):
            owner[rows] = -1 - reason
        return {
            "owner": owner,
            "reasons": np.array(list(self.left_out)),
            "classes": self.classes,
            "proportions": self.proportions,
            "unmatched": np.array(self.unmatched),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[np.generic]]) -> Self:
        """Rebuild a partition from what `to_arrays` returned."""
        owner, classes = arrays["owner"], arrays["classes"].astype(np.bool_)
        return cls(
            clients=tuple(np.flatnonzero(owner == k) for k in range(len(classes))),
            classes=classes,
            proportions=arrays["proportions"].astype(np.float64),
            left_out={str(reason): np.flatnonzero(owner == -1 - i) for i, reason in enumerate(arrays["reasons"])},
            unmatched=cast(Unmatched, str(arrays["unmatched"])),
        )


def dirichlet_presence(
    labels: NDArray[np.int8],
    clients: int,
    beta: float,
    gamma: float,
    seed: int,
    *,
    groups: NDArray[np.int64] | None = None,
    unmatched: Unmatched = "drop",
    min_samples: int = 32,
    draws: int = 64,
) -> Partition:
    """Draw the clients' classes and shares and deal the images; repeat until each client has `min_samples`.

    Each client holds ceil(gamma C) of the C classes. Of `draws` random tables of who holds which class, the one with
    the fewest unmatched images is kept. The smaller beta, the more uneven the shares.
    labels: (N, C), 1 present, 0 absent, -1 unknown; groups: (N,), images of one group stay together.
    """
    _check_settings(labels, clients, beta, gamma, unmatched, min_samples)
    held = math.ceil(gamma * labels.shape[1] - 1e-9)
    best = -1
    for attempt in range(ATTEMPTS):
        rng = numpy_rng(seed, "partition", attempt)
        classes = _draw_classes(labels, clients, held, draws, rng)
        proportions = _draw_proportions(classes, beta, rng)
        partition = deal(labels, classes, proportions, rng, groups=groups, unmatched=unmatched)
        smallest = min(map(len, partition.clients))
        if smallest >= min_samples:
            return partition
        best = max(best, smallest)
    raise FedncaError(
        f"in {ATTEMPTS} draws for {clients} clients, the smallest client never had more than {best} images, but "
        f"min_samples is {min_samples}; lower min_samples or clients, or raise beta (evenness of the shares, {beta:g}) "
        f"or gamma (share of the classes that a client holds, {gamma:g})"
    )


def deal(
    labels: NDArray[np.int8],
    classes: NDArray[np.bool_],
    proportions: NDArray[np.float64],
    rng: np.random.Generator,
    *,
    groups: NDArray[np.int64] | None = None,
    unmatched: Unmatched = "drop",
) -> Partition:
    """Deal images to clients whose classes and shares are already known.

    An image goes to one of the clients that may hold it, to client k with probability ∝ the mean of p_c[k] over the
    image's labels c. A group goes as a whole, by the sum of its images' probabilities. Images without labels are dealt
    evenly.
    labels: (N, C); classes: (K, C); proportions: (C, K); groups: (N,).
    """
    sets, which = _label_sets(labels)
    may_hold = _eligible(sets, classes, unmatched)
    chances = _chances(sets, may_hold, proportions)
    unit = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    count = int(unit.max(initial=-1)) + 1

    weights = np.zeros((count, len(classes)))
    for k, chance in enumerate(chances.T):
        # bincount adds in row order, so the sums are the same on every machine; those of a matrix product need not be.
        weights[:, k] = np.bincount(unit, chance[which], count)
    placeable = np.any(may_hold, axis=1)[which]
    drawn = weights.any(axis=1)
    evenly = rng.permutation(np.flatnonzero((np.bincount(unit, placeable, count) > 0) & ~drawn))
    taker = np.full(count, -1)
    taker[drawn] = _draw_columns(weights[drawn], rng)
    taker[evenly] = np.arange(len(evenly)) % len(classes)

    owner = taker[unit]
    fits = placeable & may_hold[which, owner]
    return Partition(
        clients=tuple(np.flatnonzero(fits & (owner == k)) for k in range(len(classes))),
        classes=classes,
        proportions=proportions,
        left_out={NOWHERE: np.flatnonzero(~placeable), ELSEWHERE: np.flatnonzero(placeable & ~fits)},
        unmatched=unmatched,
    )


def natural_sites(labels: NDArray[np.int8], sites: NDArray[np.int64], num_sites: int) -> Partition:
    """Make every site a client with its own images; nothing is random, and nothing is left out.

    A site's classes are those that it has a positive of. A class's shares are its positives at each site.
    labels: (N, C); sites: (N,), from 0 to num_sites - 1.
    """
    if not ((sites >= 0) & (sites < num_sites)).all():
        low, high = sites.min(), sites.max()
        raise FedncaError(f"sites run from {low} to {high}; give numbers from 0 to {num_sites - 1}, one per site")
    clients = tuple(np.flatnonzero(sites == k) for k in range(num_sites))
    positives = np.stack([(labels[rows] == 1).sum(axis=0) for rows in clients])  # (K, C)
    return Partition(
        clients=clients,
        classes=positives > 0,
        proportions=positives.T / np.maximum(positives.sum(axis=0), 1)[:, None],
        left_out={},
        unmatched="drop",
    )


def summary(partition: Partition, labels: NDArray[np.int8]) -> NDArray[np.intp]:
    """Count the positives that each client sees of each class: (K, C)."""
    seen = (partition.client_labels(labels, k) for k in range(len(partition.clients)))
    return np.stack([(own == 1).sum(axis=0) for own in seen])


def _check_settings(
    labels: NDArray[np.int8], clients: int, beta: float, gamma: float, unmatched: str, min_samples: int
) -> None:
    if labels.ndim != 2:
        raise FedncaError(f"labels have shape {labels.shape}; give one row per image and one column per class")
    if clients < 1:
        raise FedncaError(f"clients is {clients}; give at least 1")
    if not 0 < beta < math.inf:
        raise FedncaError(f"beta (evenness of the clients' shares) is {beta}; give a number above 0")
    if not 0 < gamma <= 1:
        raise FedncaError(f"gamma (share of the classes per client) is {gamma}; give a number above 0 and at most 1")
    if gamma * labels.shape[1] < 1 - 1e-9:
        raise FedncaError(
            f"gamma (share of the classes per client) is {gamma:g}, but of {labels.shape[1]} classes this is less than "
            "one class; raise gamma"
        )
    if unmatched not in get_args(Unmatched):
        raise unknown_name("unmatched policy", unmatched, get_args(Unmatched))
    if len(labels) < clients * min_samples:
        raise FedncaError(
            f"{len(labels)} images are too few to give {clients} clients at least {min_samples} each (min_samples); "
            "lower min_samples or clients"
        )


def _draw_classes(
    labels: NDArray[np.int8], clients: int, held: int, draws: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw who holds which class, (K, C): `held` classes per client, and two clients per class if possible."""
    num_classes = labels.shape[1]
    if clients * held < num_classes:
        raise FedncaError(
            f"{clients} clients with {held} classes each cannot hold all {num_classes} classes; "
            "raise gamma (share of the classes per client) or clients"
        )
    holders = 2 if clients * held >= 2 * num_classes else 1
    tables = rng.permuted(np.tile(np.arange(num_classes) < held, (draws, clients, 1)), axis=2)
    complete = (tables.sum(axis=1) >= holders).all(axis=1)
    if complete.any():
        tables = tables[complete]
    else:
        for table in tables:
            _mend(table, holders, rng)
    sets, which = _label_sets(labels)
    frequency = np.bincount(which, minlength=len(sets))
    unmatched = [frequency[~_contained(sets, table).any(axis=1)].sum() for table in tables]
    return np.asarray(tables[np.argmin(unmatched)])


def _mend(table: NDArray[np.bool_], holders: int, rng: np.random.Generator) -> None:
    """Swap clients' classes in place until each class has at least `holders` clients.

    Such a swap always exists: a class with more than `holders` clients is held by one that lacks the short class.
    """
    for short in rng.permutation(table.shape[1]):
        while table[:, short].sum() < holders:
            spare = table & (table.sum(axis=0) > holders) & ~table[:, [short]]
            client, given_up = rng.choice(np.argwhere(spare))
            table[client, given_up], table[client, short] = False, True


def _draw_proportions(classes: NDArray[np.bool_], beta: float, rng: np.random.Generator) -> NDArray[np.float64]:
    proportions = np.zeros(classes.T.shape)
    for share, holds in zip(proportions, classes.T, strict=True):
        share[holds] = rng.dirichlet(np.full(holds.sum(), beta))
    return proportions


def _label_sets(labels: NDArray[np.int8]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """Return the distinct sets of present labels, (S, C), and which of them each image has, (N,)."""
    packed = np.ascontiguousarray(np.packbits(labels == 1, axis=1))  # a data frame stores labels column by column
    # One opaque value per row sorts ten times faster than np.unique(axis=0), which compares column by column.
    rows, which = np.unique(packed.view(f"V{packed.shape[1]}").reshape(-1), return_inverse=True)
    sets = np.unpackbits(rows.view(np.uint8).reshape(-1, packed.shape[1]), axis=1, count=labels.shape[1])
    return sets.astype(np.bool_), which


def _contained(sets: NDArray[np.bool_], classes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which label sets are subsets of which client's classes C_k: (S, K)."""
    # float32 makes the product fast, and counts this small are exact in it.
    return np.equal(sets.astype(np.float32) @ ~classes.T, 0)


def _eligible(sets: NDArray[np.bool_], classes: NDArray[np.bool_], unmatched: Unmatched) -> NDArray[np.bool_]:
    """Return which label set may go to which client: (S, K)."""
    contained = _contained(sets, classes)
    if unmatched != "drop":
        stray = ~contained.any(axis=1)
        contained[stray] = ~_contained(sets[stray], ~classes)
    return contained


def _chances(
    sets: NDArray[np.bool_], may_hold: NDArray[np.bool_], proportions: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each label set's probabilities over the clients, (S, K).

    Rows sum to 1, or to 0 for the empty set and for sets that no client may hold.
    """
    weights = np.zeros(may_hold.shape)
    for has, share in zip(sets.T, proportions, strict=True):
        weights[has] += share
    weights *= may_hold
    weights[~weights.any(axis=1)] = 1
    weights *= may_hold & sets.any(axis=1, keepdims=True)
    total = weights.sum(axis=1, keepdims=True)
    weights /= np.where(total > 0, total, 1)
    return weights


def _draw_columns(weights: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw one column per row with probability ∝ weight: (n, K) → (n,)."""
    cumulative = weights.cumsum(axis=1)
    threshold = rng.random((len(weights), 1)) * cumulative[:, -1:]
    return np.asarray((cumulative > threshold).argmax(axis=1))
