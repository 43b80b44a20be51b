"""Takes replicas apart that hold reference cycles, so that their memory is free when the call ends.

A bound method or a reference to the parent makes a cycle in the source, which lives long, and in each replica, which
lives for one forward. Reference counting does not free cycles: copies of all weights would wait for the collector.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from dataparallel import ownership
from dataparallel._torch import OWN_HOOK_TABLES, REGISTRIES
from dataparallel.replicas.plan import MADE_FOR_ATTRIBUTES


class CycleBreaker:
    """Takes replicas apart if they may hold cycles and nothing else holds a part of them.

    If something does, a checkpoint that runs the replica's methods again in backward for example, the replica is tried
    again at the end of the next call; the collector frees it if no call follows. Where reference counts are not
    trusted, all such replicas are left to the collector.

    A call holds it, and calls `take_apart` when it succeeds. If the call fails, the breaker lives as long as a
    traceback of the failure, and takes the replicas apart when it is deleted. It keeps nothing alive itself.
    """

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        trusted = ownership.are_counts_trusted()
        self._roots = [weakref.ref(replica) for replica in replicas if trusted and MADE_FOR_ATTRIBUTES in vars(replica)]

    def __del__(self) -> None:
        self.take_apart()

    def take_apart(self) -> None:
        """Takes the replicas apart, and replicas that were still in use when an earlier call ended."""
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
    """Returns ``False`` if something else holds a part of the replica."""
    parts = _parts(root)
    if not _only_their_own(parts):
        return False
    for part in parts:
        if issubclass(type(part), nn.Module):
            vars(part).clear()
    return True


def _parts(root: weakref.ref[nn.Module]) -> list[Any]:
    """The modules of a replica, and the objects that were made for their attributes."""
    replica = root()
    return [] if replica is None else [*replica.modules(), *vars(replica)[MADE_FOR_ATTRIBUTES]]


def _only_their_own(parts: list[Any]) -> bool:
    """True if ``parts`` are referenced only by each other and by this list.

    The number of references to each part is compared with the number of references from the other parts. A holder of a
    registry, or of a view of it, holds the module's children: registries count as parts.
    """
    if not ownership.are_counts_trusted():
        return False
    modules = [part for part in parts if issubclass(type(part), nn.Module)]
    made = [part for part in parts if not issubclass(type(part), nn.Module)]
    attributes = [vars(module) for module in modules]
    names = (*REGISTRIES, *OWN_HOOK_TABLES)
    known = set(map(id, made))  # a new hook table is one of these
    tables = [own[name] for own in attributes for name in names if name in own and id(own[name]) not in known]
    noted = [own[MADE_FOR_ATTRIBUTES] for own in attributes if MADE_FOR_ATTRIBUTES in own]
    holders = {id(holder): holder for holder in (*attributes, *tables, *made, *noted)}
    inside = ownership.references_inside(holders.values())
    # Besides ``parts``, one list here refers to each of these objects; holders are in a dict too.
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
