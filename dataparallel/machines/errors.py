"""`MachinesError` and its subclasses: the errors of a group of machines. Their messages name the ranks, and what this
rank has waited for. Any room may catch them. ``forms`` and ``sharded.units`` raise them too, where ranks differ.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class MachinesError(RuntimeError):
    """Something has failed between machines."""


class PeerGone(MachinesError):
    """A rank has ended, hangs, or did not come within the group's timeout. The group cannot be used any more."""


class PeerFailed(MachinesError):
    """A rank has failed in a step. The message contains the error of that rank."""


class MachinesDiffer(MachinesError):
    """Ranks are about to do different things. No result of the step is used, and the group can still be used."""


def copy_error(error: E) -> E:
    """A copy of the error for another thread to raise: threads that raise one object would mix their tracebacks."""
    if not isinstance(error, MachinesError):
        return error
    other = type(error)(*error.args)
    other.__cause__ = error.__cause__
    return other


def describe_error(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
