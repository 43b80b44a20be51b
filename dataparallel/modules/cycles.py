"""Taking apart replicas whose attributes refer to each other in circles.

A bound method or a reference to the parent makes a circle in the source, which lives long, and in each replica, which
lives for one forward. Reference counting does not free circles, and copies of all weights would wait for the garbage
collector. So when a call ends, replicas that nothing outside of them refers to are taken apart. Something may: a
checkpoint runs a replica's methods again in backward. Such replicas are looked at again when the next call ends; until
then, and if nobody calls again, they are the collector's. So are all of them where ``ownership`` cannot tell what
refers to them. ``replicate`` says what it made, ``data_parallel`` says when a call ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from dataparallel import ownership
from dataparallel._torch import OWN_HOOK_TABLES, REGISTRIES
from dataparallel.modules.plan import MADE

__all__ = ["CycleBreaker", "note_circles"]


def note_circles(replica: nn.Module, made: list[Any]) -> None:
    """Notes on the root of a replica the objects that were made for its attributes, for a `CycleBreaker`."""
    vars(replica)[MADE] = made


class CycleBreaker:
    """Takes replicas apart, if they may be circular and nothing else holds a part of them.

    It belongs into the frame of the call, which calls `take_apart` when all is well. When the call fails the frame
    lives until the last traceback of the failure is gone, and then the breaker does it as it dies. It keeps nothing
    alive itself.
    """

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        told = ownership.can_be_told()
        self._roots = [weakref.ref(replica) for replica in replicas if told and MADE in vars(replica)]

    def __del__(self) -> None:
        self.take_apart()

    def take_apart(self) -> None:
        """Takes the replicas apart, and those of earlier calls that were still in use then."""
        roots, self._roots = self._roots, []
        while _in_use:
            try:
                roots.append(_in_use.popleft())
            except IndexError:  # another thread was first
                break
        for root in roots:
            if not _take_apart(root):
                _in_use.append(root)


# Roots of replicas that were in use when their call ended.
_in_use: deque[weakref.ref[nn.Module]] = deque(maxlen=256)


def _take_apart(root: weakref.ref[nn.Module]) -> bool:
    """Whether the replica is gone."""
    parts = _parts(root)
    if not _only_their_own(parts):
        return False
    for part in parts:
        if issubclass(type(part), nn.Module):
            vars(part).clear()
    return True


def _parts(root: weakref.ref[nn.Module]) -> list[Any]:
    """The modules of a replica, and what was made for their attributes."""
    replica = root()
    return [] if replica is None else [*replica.modules(), *vars(replica)[MADE]]


def _only_their_own(parts: list[Any]) -> bool:
    """True if ``parts`` are referenced only by each other and by this list.

    References are counted: those that there are against those that are held inside. Who holds a module's registry, or
    a view of it, holds its children: registries count as parts.
    """
    if not ownership.can_be_told():
        return False
    modules = [part for part in parts if issubclass(type(part), nn.Module)]
    made = [part for part in parts if not issubclass(type(part), nn.Module)]
    attributes = [vars(module) for module in modules]
    names = (*REGISTRIES, *OWN_HOOK_TABLES)
    known = set(map(id, made))  # a hook table that was made anew is one of these
    tables = [own[name] for own in attributes for name in names if name in own and id(own[name]) not in known]
    noted = [own[MADE] for own in attributes if MADE in own]
    holders = {id(holder): holder for holder in (*attributes, *tables, *made, *noted)}
    inside = ownership.references_inside(holders.values())
    # Beside ``parts`` each of these objects is in one list here, and holders are in one dict more.
    extra = ownership.references_of_one()
    control = nn.Module()
    (owned,) = ownership.references([vars(control)])
    return (
        all(count == inside[name] + extra + 1 for name, count in _counts(modules))
        and all(count == inside[name] + extra + 2 for name, count in _counts(made))
        and all(count == inside[name] + extra + 1 for name, count in _counts(tables))
        and all(count == owned + 1 for _, count in _counts(attributes))
    )


def _counts(objects: list[Any]) -> list[tuple[int, int]]:
    return [*zip(map(id, objects), ownership.references(objects), strict=True)]
