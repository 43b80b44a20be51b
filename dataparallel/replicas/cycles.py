"""`ReferenceCycles` breaks the reference cycles of a call's replicas when nothing needs the replicas any more.

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

CYCLES = "_dataparallel_cycles"
"""Attribute of a replica's root: its `ReferenceCycles`, which refer to the replica weakly."""


class ReferenceCycles:
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

    def break_unless_needed(self) -> None:
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
    """Keeps the attributes of `ReferenceCycles` as they are, as long as this object lives."""

    __slots__ = ("_cycles", "_holds")

    def __init__(self, cycles: ReferenceCycles, holds: set[int]) -> None:
        self._cycles, self._holds = cycles, holds
        holds.add(id(self))

    def __del__(self) -> None:
        self._holds.discard(id(self))
        self._cycles.break_unless_needed()


def cycles_of(replicas: Iterable[Any]) -> list[ReferenceCycles]:
    """Returns the `ReferenceCycles` of those ``replicas`` that have some."""
    found = (vars(replica).get(CYCLES) for replica in replicas)
    return [*{id(cycles): cycles for cycles in found if cycles is not None}.values()]


def hold_by_output(cycles: Sequence[ReferenceCycles], tensors: Iterable[Tensor]) -> None:
    """Has the graph of a call's output hold ``cycles``, until no node of these ``tensors`` is left."""
    holds = [each.hold("output") for each in cycles]
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[id(holds)] = holds  # type: ignore[index]  # torch's hints say that it is a method
