"""The errors of a group of machines. What a wait raises names the ranks and what was waited for. Any room may catch
them; ``forms`` and ``sharded.units`` raise them too, for what they compare.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class MachinesError(RuntimeError):
    """Something has failed between machines.

    Attributes:
        is_of_peers: a collective of replicas has raised it, so a form's other rounds do not know of it yet.
    """

    is_of_peers = False


class PeerGone(MachinesError):
    """A rank has ended, hangs, or did not come within the group's timeout. The group cannot be used any more."""


class PeerFailed(MachinesError):
    """A rank has failed in what all ranks do together. Its error is part of the sentence.

    Attributes:
        by_all: every rank has failed.
    """

    by_all = False


class MachinesDiffer(MachinesError):
    """Ranks are about to do different things. Nothing has been sent, and the group can be used on."""


def again(error: E) -> E:
    """An error like this one, for another thread to raise: threads that share one would mix their tracebacks."""
    if not isinstance(error, MachinesError):
        return error
    other = type(error)(*error.args)
    other.__cause__ = error.__cause__
    return other


def in_words(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
