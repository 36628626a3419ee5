"""What a user can mend: raised with one sentence that names the thing, the value and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST_LISTED = 15  # beyond that, only the nearest names are told


class FedncaError(Exception):
    """Something the caller can mend; the command line prints its one sentence and exits with code 2."""


class UnfitEngineError(FedncaError):
    """An engine cannot execute this run; the message says why, as the end of a sentence."""


class InUseError(FedncaError):
    """A folder that another process works in."""


class ChangedDataError(FedncaError):
    """Data of a site that are not those it began a run with."""


class RunFailedError(FedncaError):
    """A run that could not go on (a non-finite loss, a full disk); what was done so far is on disk."""


def unknown_name(kind: str, name: str, known: Iterable[str], lister: str = "") -> FedncaError:
    """Build the error for a name that is not known, with the nearest known ones, or the command that lists all.

    >>> unknown_name("method", "fednca", ["fedavg", "fednca-ml"])
    FedncaError("method 'fednca' is not known; did you mean 'fednca-ml'? (known: fedavg, fednca-ml)")
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    listed = names if len(names) <= MOST_LISTED else near
    further = f" (known: {', '.join(listed)})" if listed else f"; see `{lister}`" if lister else ""
    return FedncaError(f"{kind} '{name}' is not known{hint}{further}")
