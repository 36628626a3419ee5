"""Errors that a user can fix; each message is one sentence that names the thing, the value and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST_LISTED = 15  # with more names than that, only the nearest ones are listed


class FedncaError(Exception):
    """Something that the caller can fix; the command line prints its one sentence and exits with code 2."""


class UnfitEngineError(FedncaError):
    """An engine cannot do this run; the message says why, in words that end a sentence."""


class InUseError(FedncaError):
    """Another process is working in this folder."""


class ChangedDataError(FedncaError):
    """A site's data have changed since it began the run."""


class RunFailedError(FedncaError):
    """A run could not continue (a non-finite loss, a full disk); what it has done so far is on disk."""


def unknown_name(kind: str, name: str, known: Iterable[str], lister: str = "") -> FedncaError:
    """Build the error for an unknown name, with the known ones, or the nearest, or the command that lists them.

    >>> unknown_name("method", "fednca", ["fedavg", "fednca-ml"])
    FedncaError("method 'fednca' is not known; did you mean 'fednca-ml'? (known: fedavg, fednca-ml)")
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    listed = names if len(names) <= MOST_LISTED else near
    further = f" (known: {', '.join(listed)})" if listed else f"; see `{lister}`" if lister else ""
    return FedncaError(f"{kind} '{name}' is not known{hint}{further}")
