"""`WeakMembers`: a set of objects that it does not keep alive, for several threads. Any room may call this one.

``weakref.WeakSet`` and ``WeakValueDictionary`` are written in Python, in several steps. If one thread walks through
them while another one adds an object, or drops the last reference to one, the walk may raise that the size has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WeakMembers(Generic[T]):
    """Objects that exist, each once, in the order in which they were added. Any thread may use it.

    There is no lock: each step is one operation of a dict, because the garbage collector may drop an object anywhere.
    Objects are told apart by identity.
    """

    __slots__ = ("__weakref__", "_references")

    def __init__(self) -> None:
        # The key is the id of the object. No other object gets the id before the reference's callback has run.
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, member: T) -> None:
        key = id(member)
        self._references.setdefault(key, weakref.ref(member, partial(_drop, weakref.ref(self), key)))

    def discard(self, member: T) -> None:
        self._references.pop(id(member), None)

    def clear(self) -> None:
        self._references.clear()

    def __iter__(self) -> Iterator[T]:
        """Gives the objects that are there now, and that still exist when their turn comes."""
        for reference in list(self._references.values()):
            member = reference()
            if member is not None:
                yield member

    def __len__(self) -> int:
        return len(self._references)


def _drop(owner: weakref.ref[WeakMembers[Any]], key: int, _: object) -> None:
    """Called when a member is gone. It refers to its set weakly, so that these two make no reference cycle."""
    members = owner()
    if members is not None:
        members._references.pop(key, None)
