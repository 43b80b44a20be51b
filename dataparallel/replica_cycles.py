"""Taking apart replicas whose attributes refer to each other in circles.

A bound method or a reference to the parent makes a circle in the source, which lives long, and in each replica, which
lives for one forward. Reference counting does not free circles, and copies of all weights would wait for the garbage
collector. So when a call ends, replicas that nothing outside of them refers to are taken apart. Something may: a
checkpoint runs a replica's methods again in backward. Such replicas are looked at again when the next call ends, and
those that stay in use for many calls are left to the collector. ``replicate`` says what it made, ``data_parallel`` says
when a call ends.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from dataparallel.module_plan import HOOK_TABLES, REGISTRIES

__all__ = ["CycleBreaker", "note_circles"]

_MADE = "_dataparallel_made"


def note_circles(replica: nn.Module, made: list[Any]) -> None:
    """Notes on the root of a replica the objects that were made for its attributes, for a `CycleBreaker`."""
    vars(replica)[_MADE] = made


class CycleBreaker:
    """Takes replicas apart, if they may be circular and nothing else holds a part of them.

    It belongs into the frame of the call, which calls `take_apart` when all is well. When the call fails the frame
    lives until the last traceback of the failure is gone, and then the breaker does it as it dies.
    """

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        self._parts: list[Any] = []
        for replica in replicas:
            made = vars(replica).pop(_MADE, None)
            if made is not None:
                self._parts += [*replica.modules(), *made]

    def __del__(self) -> None:
        self.take_apart()

    def take_apart(self) -> None:
        """Takes the replicas apart, and those of earlier calls that were still in use then."""
        if not self._parts:
            return
        waiting, self._parts = [self._parts], []
        while _in_use:
            try:
                waiting.append(_in_use.popleft())
            except IndexError:  # another thread was first
                break
        for parts in reversed(waiting):
            _take_apart(parts)


# Parts of replicas that were in use when their call ended: a few, or one wrapper's forgotten outputs would pile up.
_in_use: deque[list[Any]] = deque(maxlen=8)


def _take_apart(parts: list[Any]) -> None:
    if not _only_their_own(parts):
        _in_use.append(parts)
        return
    for part in parts:
        if issubclass(type(part), nn.Module):
            vars(part).clear()


def _only_their_own(parts: list[Any]) -> bool:
    """Whether every reference to one of ``parts``, but those in that list, comes from another of them.

    References are counted: those that there are against those that the parts and their ``__dict__`` hold. Where an
    interpreter counts or lists them differently than expected, the two differ and the answer is no.
    """
    inside = Counter(id(held) for holder in _holders(parts) for held in gc.get_referents(holder))
    # What the list, the loop and the call below add to each count.
    ((_, extra),) = _counts([object()])
    return all(count == inside[name] + extra for name, count in _counts(parts))


def _counts(objects: list[Any]) -> list[tuple[int, int]]:
    return [(id(item), sys.getrefcount(item)) for item in objects]


def _holders(parts: Iterable[Any]) -> Iterable[Any]:
    """The parts with what belongs to a module alone: its ``__dict__``, its registries, its hook tables. Each once."""
    found: dict[int, Any] = {}
    for part in parts:
        if issubclass(type(part), nn.Module):
            attributes = vars(part)
            tables = [attributes[name] for name in (*REGISTRIES, *HOOK_TABLES) if name in attributes]
            found.update({id(holder): holder for holder in (attributes, *tables)})
        else:
            found[id(part)] = part
    return found.values()
