"""`Circles` opens the reference cycles of a call's replicas when nothing needs the replicas any more.

A bound method or a reference to the parent makes a cycle, in the source and so in each replica. With a cycle, a
replica's copies of all weights would live until the garbage collector runs. ``build`` notes the attributes that may
close one; calls (``call.engine``), ``frozen`` blocks and graphs hold the replicas.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from dataparallel._torch import HOOK_TABLES

CIRCLES = "_dataparallel_circles"
"""Attribute of a replica's root: its `Circles`, which refer to the replica weakly."""


class Circles:
    """Attributes of the replicas of one call through which a replica may lead back to itself.

    The attributes are deleted when nothing needs the replicas any more. Then reference counting frees what nobody else
    refers to. Code that refers to a part of a replica for longer finds the part whole but for these attributes.

    Three kinds of `Hold` tell who needs the replicas. The *call* does while it runs. A graph does, because a checkpoint
    may run methods of the replicas again: as long as *backward* may still run on the slots, and as long as nodes of the
    call's *output* lead there. A replica leads to its graph itself, so neither of the last two would be enough.

    Holds may be dropped in any thread, by the garbage collector too. So nothing here waits for a lock.
    """

    def __init__(self) -> None:
        self._attributes: list[tuple[weakref.ref[nn.Module], Sequence[str]]] = []
        self._holds: dict[str, set[int]] = {"call": set(), "backward": set()}  # ids; "output" once there is one

    def add(self, module: nn.Module, names: Sequence[str]) -> None:
        """Notes attributes of a replica's module."""
        self._attributes.append((weakref.ref(module), names))

    def hold(self, kind: Literal["call", "backward", "output"]) -> Hold:
        """Returns a new hold."""
        return Hold(self, self._holds.setdefault(kind, set()))

    @property
    def are_held_by_graph(self) -> bool:
        """True if a backward may still run on the slots."""
        return bool(self._holds["backward"])

    def open_unless_needed(self) -> None:
        """Deletes the attributes if no hold keeps them. Two threads may do this at the same time."""
        holds = self._holds
        if holds["call"] or (holds["backward"] and ("output" not in holds or holds["output"])):
            return
        attributes, self._attributes = self._attributes, []
        for reference, names in attributes:
            module = reference()
            if module is not None:
                own = vars(module)
                own.update((name, OrderedDict()) for name in names if name in HOOK_TABLES)
                for name in names:
                    if name not in HOOK_TABLES:
                        own.pop(name, None)


class Hold:
    """Keeps the attributes of `Circles` as they are, as long as this object lives."""

    __slots__ = ("_circles", "_holds")

    def __init__(self, circles: Circles, holds: set[int]) -> None:
        self._circles, self._holds = circles, holds
        holds.add(id(self))

    def __del__(self) -> None:
        self._holds.discard(id(self))
        self._circles.open_unless_needed()


def circles_of(replicas: Iterable[Any]) -> list[Circles]:
    """Returns the `Circles` of those ``replicas`` that have some."""
    found = (vars(replica).get(CIRCLES) for replica in replicas)
    return [*{id(circles): circles for circles in found if circles is not None}.values()]


def hold_by_output(circles: Sequence[Circles], tensors: Iterable[Tensor]) -> None:
    """Has the graph of a call's output hold ``circles``, until no node of these ``tensors`` is left."""
    holds = [each.hold("output") for each in circles]
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[id(holds)] = holds  # type: ignore[index]  # torch's hints say that it is a method
