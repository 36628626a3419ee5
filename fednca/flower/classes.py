"""One list of classes for all sites, joined by name in a fixed order; a class that a site lacks is unknown there."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fednca.base.errors import FedncaError


def join_classes(sites: Mapping[str, Sequence[str]], wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the classes of all sites: `wanted`, else the list that all sites share, else sorted by name.

    >>> join_classes({"north": ["edema", "mass"], "south": ["mass", "cyst"]})
    ('cyst', 'edema', 'mass')
    """
    check_spelling(sites)
    if wanted is not None:
        for site, own in sites.items():
            check_known(site, own, wanted)
        return tuple(wanted)
    lists = {tuple(own) for own in sites.values()}
    if len(lists) == 1:
        return lists.pop()
    return tuple(sorted({name for own in sites.values() for name in own}))


def check_known(site: str, own: Sequence[str], joint: Sequence[str]) -> None:
    """Refuse a site that has a class twice, none at all, or one that the federation does not have."""
    if not own or len(set(own)) < len(own):
        raise FedncaError(f"site '{site}' must name each of its classes once, not {', '.join(own) or 'none'}")
    unknown = [name for name in own if name not in joint]
    if unknown:
        near = [name for name in joint if _letters(name) == _letters(unknown[0])]
        way_out = f"did it mean '{near[0]}'?" if near else "add it to `classes` in a new run, or remove it at the site"
        raise FedncaError(f"site '{site}' has class '{unknown[0]}', which the federation does not have; {way_out}")


def check_spelling(sites: Mapping[str, Sequence[str]]) -> None:
    """Refuse two spellings of one name, such as 'Pleural_Thickening' and 'pleural thickening', at two sites.

    Two spellings that one site has as two different classes are allowed.
    """
    distinct = {frozenset((a, b)) for own in sites.values() for a in own for b in own if a != b}
    first: dict[str, tuple[str, str]] = {}
    for site, own in sites.items():
        for name in own:
            other_site, other = first.setdefault(_letters(name), (site, name))
            if other != name and frozenset((other, name)) not in distinct:
                raise FedncaError(
                    f"site '{other_site}' writes class '{other}', and site '{site}' writes '{name}'; agree on one name"
                )


def to_joint(labels: NDArray[np.int8], own: Sequence[str], joint: Sequence[str]) -> NDArray[np.int8]:
    """Map a site's labels (N, c) to the federation's classes (N, C); classes it lacks are -1, unknown."""
    found = np.full((len(labels), len(joint)), -1, np.int8)
    found[:, [joint.index(name) for name in own]] = labels
    return found


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))
