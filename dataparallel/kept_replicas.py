"""Replicas for one call after the other: what can be used again is kept.

Kept are the module objects of plain trees, which get their attributes anew, and while no graph is recorded copies of
the tensors (``kept_copies``). Every call still sees whatever the source is then, and nothing of what ``forward`` did to
the replicas of the last call. Values are sent again each time, because a write through ``.data`` leaves no trace that
could be asked for. Only inside ``frozen`` replicas stay as they are, and nothing is sent. What has been replaced in the
source, a parameter for example, lives on until the next call.

Nobody has to say when a call is over: what somebody else still holds (a call that runs in another thread, a
parameter that ``forward`` returned, a replica that a hook has stored) is left to them and made again. ``ownership``
tells; where it cannot, each call outside of ``frozen`` has replicas and copies of its own. Sets inside ``frozen`` are
leased instead. How fresh replicas are made is ``replicate``'s business; ``data_parallel`` owns a `KeptReplicas` for
each wrapper.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from itertools import chain
from operator import is_
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from dataparallel import ownership
from dataparallel._torch import HOOK_TABLES
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.kept_copies import KeptCopies
from dataparallel.module_plan import ModulePlan
from dataparallel.module_snapshot import TreeSnapshot
from dataparallel.replica_cycles import CycleBreaker
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicate import (
    bare_module,
    build_replica,
    collector_paused,
    copy_tensors,
    hook_flags,
    make_parameters,
    own_attributes,
)
from dataparallel.streams import current_streams

__all__ = ["MOST_FROZEN", "CallTensors", "KeptReplicas"]

MOST_FROZEN = 4
"""How many sets of replicas stay in one `frozen`: one for each call that runs at a time. Further calls make theirs."""


_all: weakref.WeakSet[KeptReplicas] = weakref.WeakSet()


class CallTensors(Protocol):
    """Where the replicas of a call get their tensors from; asked for one call at a time. Copies of it are empty."""

    def for_call(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, record: bool) -> list[list[Tensor]]:
        """The plan's tensors for each slot, with the values of now; ``record``: whether a graph is recorded."""

    def end_call(self) -> None:
        """Takes from what is kept all that the last call has left on it."""

    def forget_last_call(self) -> None:
        """Leaves what the last call, which has failed, has used to whoever still holds it."""

    def clear(self) -> None:
        """Lets go of everything."""


class _NewOrKept:
    """New tensors where a graph is recorded, kept copies where none is."""

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[_NewOrKept], tuple[()]]:
        return _NewOrKept, ()

    def clear(self) -> None:
        self._copies = KeptCopies()

    def for_call(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, record: bool) -> list[list[Tensor]]:
        if not record:
            return self._copies.refreshed(plan, slots, cap_bytes)
        self.clear()  # a training needs the memory
        copies = copy_tensors(plan, slots, True, cap_bytes)
        for tensors in copies:
            make_parameters(plan, tensors, ReplicaParameter)
        return copies

    def end_call(self) -> None:
        self._copies.end_call()

    def forget_last_call(self) -> None:
        self.clear()


class KeptReplicas:
    """What one wrapper keeps: at most a copy of the module for each slot, inside `frozen` `MOST_FROZEN` of them.

    It is for any thread. Copies of it, and what is unpickled, are empty.

    Args:
        tensors: where replicas get their tensors from, but inside `frozen`; default: new ones for each call that
            records a graph, kept copies for others.
    """

    def __init__(self, tensors: CallTensors | None = None) -> None:
        self._tensors = _NewOrKept() if tensors is None else tensors
        self._lock = threading.Lock()
        self._frozen = 0  # open blocks
        self._clear()
        _all.add(self)

    def __reduce__(self) -> tuple[type[KeptReplicas], tuple[CallTensors]]:
        return KeptReplicas, (copy.copy(self._tensors),)

    def _clear(self) -> None:
        self._plan: ModulePlan | None = None
        self._snapshot: TreeSnapshot | None = None
        self._shells: list[_Shell] = []
        self._frozen_sets: list[_FrozenSet] = []
        self._is_of_a_parent = False  # what is kept was made in the process from which this one was forked
        self._tensors.clear()

    @property
    def is_frozen(self) -> bool:
        """Whether a block is open."""
        return self._frozen > 0

    def clear(self) -> None:
        """Lets go of everything."""
        with self._lock:
            self._clear()

    def freeze(self) -> None:
        """From here on replicas stay as they are, until `thaw` has been called as often."""
        with self._lock:
            self._frozen += 1
            if self._frozen == 1:
                self._clear()

    def thaw(self) -> None:
        """Ends one block; after the last one nothing of it is kept."""
        with self._lock:
            self._frozen -= 1
            if self._frozen:
                return
            breaker = CycleBreaker([replica for kept in self._frozen_sets for replica in kept.replicas])
            self._clear()
        breaker.take_apart()

    def replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        """Replicas for ``slots``, as `dataparallel.replicate` makes them.

        Raises:
            RuntimeError: the tree cannot be replicated, the message names the module; or a graph is recorded inside
                `frozen`.
        """
        record = torch.is_grad_enabled()
        with self._lock:
            if self._frozen and record:
                raise RuntimeError(
                    "inside model.frozen() replicas stay as they are and no gradient leads back to the module; call "
                    "the model under torch.no_grad() or torch.inference_mode(), or outside of frozen()"
                )
            try:
                if self._is_of_a_parent:
                    self._clear()
                make = self._frozen_ones if self._frozen else self._refreshed
                with collector_paused():
                    return make(network, slots, cap_bytes, record)
            except BaseException:
                self._clear()  # it may be half-made
                raise

    def end_call(self) -> None:
        """Takes from what is kept all that the last call has left on it, activations for example."""
        with self._lock:
            self._reset()
            self._tensors.end_call()

    def forget_last_call(self) -> None:
        """Leaves what the last call has used to whoever still holds it."""
        with self._lock:
            self._shells = []
            self._tensors.forget_last_call()

    def _frozen_ones(self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool) -> list[Any]:
        for kept in self._frozen_sets:
            if kept.is_free() and kept.serves(network, slots):
                return kept.lease(len(slots))
        plan = ModulePlan.of(network)
        copies = KeptCopies().refreshed(plan, slots, cap_bytes)
        made = _FrozenSet(network, slots, [build_replica(plan, tensors, record=False) for tensors in copies])
        # A set of fewer slots, made for a smaller batch, gives way to one that serves both.
        self._frozen_sets = [kept for kept in self._frozen_sets if not (kept.is_free() and kept.is_part_of(made))]
        if len(self._frozen_sets) < MOST_FROZEN:
            self._frozen_sets.append(made)
        return made.lease(len(slots))

    def _refreshed(self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool) -> list[Any]:
        self._reset()
        if self._plan is None or self._snapshot is None or not self._snapshot.still_holds(network):
            self._shells = []
            self._plan = ModulePlan.of(network)
            self._snapshot = TreeSnapshot(self._plan) if self._plan.is_plain else None
        plan = self._plan
        copies = self._tensors.for_call(plan, slots, cap_bytes, record)
        if self._snapshot is None:
            self._plan = None
        if self._snapshot is None or not ownership.can_be_told():
            return [build_replica(plan, tensors, record) for tensors in copies]
        while len(self._shells) < len(slots):
            self._shells.append(_Shell(plan))
        return [shell.filled(tensors) for shell, tensors in zip(self._shells, copies, strict=False)]

    def _reset(self) -> None:
        if not all([shell.reset() for shell in self._shells]):
            self._shells = []


def _start_afresh_after_fork() -> None:
    """Another thread may have been in the middle of something when the process was forked.

    What is kept is dropped at the next call, because that may add gradients: here torch's threads are gone, and nobody
    has told torch.
    """
    for kept in _all:
        kept._lock = threading.Lock()
        kept._is_of_a_parent = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)


class _Lease(list[Any]):
    """Replicas that belong to whoever has this list, until it is gone."""

    __slots__ = ("__weakref__",)


class _FrozenSet:
    """Replicas that stay as they are, for one call at a time."""

    def __init__(self, network: nn.Module, slots: list[torch.device], replicas: list[Any]) -> None:
        self.replicas = replicas
        self._network, self._slots = network, slots
        # Nothing orders other streams after the copies, or before their memory is used again.
        self._streams = current_streams(slots)
        self._isolated = are_slots_isolated()
        self._leased: weakref.ref[_Lease] | None = None

    def serves(self, network: nn.Module, slots: list[torch.device]) -> bool:
        return (
            network is self._network
            and self._slots[: len(slots)] == slots
            and self._isolated == are_slots_isolated()
            and current_streams(slots).items() <= self._streams.items()
        )

    def is_part_of(self, other: _FrozenSet) -> bool:
        return (
            self._network is other._network
            and other._slots[: len(self._slots)] == self._slots
            and self._isolated == other._isolated
            and self._streams.items() <= other._streams.items()
        )

    def is_free(self) -> bool:
        return self._leased is None or self._leased() is None

    def lease(self, count: int) -> _Lease:
        lease = _Lease(self.replicas[:count])
        self._leased = weakref.ref(lease)
        return lease


class _Shell:
    """The module objects of one replica: filled with tensors for a call, reset after it."""

    def __init__(self, plan: ModulePlan) -> None:
        self._classes = [entry.cls for entry in plan.entries]
        self._modules = [bare_module(cls) for cls in self._classes]
        self._handed_over = [*plan.as_they_are, None]  # by positions below zero
        # What each module has at the start of a call, and what becomes of its registries.
        self._parts: list[_Part] = []
        self._tables: list[dict[Any, Any]] = []  # of hooks; plain trees have none
        self._counted: list[Any] = [*self._modules]
        flags = hook_flags()
        for entry in plan.entries:
            attributes = own_attributes(entry, entry.attributes.copy(), flags)
            children = {k: self._modules[i] if i >= 0 else self._handed_over[i] for k, i in entry.children.items()}
            self._tables += [attributes[name] for name in HOOK_TABLES]
            self._counted.append(attributes[HOOK_TABLES[0]])  # who holds all attributes of a module holds this one
            self._parts.append((attributes, [*entry.parameters.items()], [*entry.buffers.items()], children))
        self._parents = [module for module, part in zip(self._modules, self._parts, strict=True) if part[-1]]
        self._children = [child for *_, children in self._parts for child in children.values()]
        self._renew()
        self._as_made: _Attributes | None = _Attributes(self._modules, self._of_tensors)
        self._holders = ownership.Holders(self._counted, self._with_children)
        self._is_lent = False

    def filled(self, tensors: list[Tensor]) -> nn.Module:
        """The replica around ``tensors``, for the next call."""
        self._is_lent = True
        held = [*tensors, *self._handed_over]
        for registry, positions in self._to_fill:
            for key, i in positions:
                registry[key] = held[i]
        return self._modules[0]

    def reset(self) -> bool:
        """Takes back what the last call has put into the modules, or left on them.

        Returns ``False`` if that is not for us to do: somebody else holds one of them, or it is not what it was.
        """
        if self._is_lent:
            if not self._is_ours():
                return False
            if self._as_made is not None and self._as_made.is_so():
                for registry in self._of_tensors:
                    registry.clear()
            else:
                # A forward that leaves something once will do so again: it is not looked for any more.
                self._as_made = None
                del self._holders  # it has the former registries, which are to be gone when holders are noted anew
                self._renew()
                self._holders = ownership.Holders(self._counted, self._with_children)
            self._is_lent = False
        return True

    def _is_ours(self) -> bool:
        return (
            self._holders.are_the_same()
            and self._children_are_in_place()
            and not ownership.are_weakly_held(self._modules)
            and all(map(is_, map(type, self._modules), self._classes))
            and not any(self._tables)
        )

    def _children_are_in_place(self) -> bool:
        """What has left its place may have gone to somebody else, and its count is the same then."""
        for module, registry in zip(self._parents, self._with_children, strict=True):
            if vars(module).get("_modules") is not registry:
                return False
        children = [*chain.from_iterable(map(dict.values, self._with_children))]
        return len(children) == len(self._children) and all(map(is_, children, self._children))

    def _renew(self) -> None:
        """Attributes and registries that nobody has seen: who holds the former ones may go on doing so."""
        self._to_fill: list[_Positions] = []
        self._with_children: list[dict[str, Any]] = []  # registries of `_parents`
        self._of_tensors: list[dict[str, Any]] = []  # registries of parameters and of buffers
        for module, (attributes, parameters, buffers, children) in zip(self._modules, self._parts, strict=True):
            own = attributes.copy()
            own_parameters: dict[str, Any] = {}
            own_buffers: dict[str, Any] = {}
            own_children = children.copy()
            own["_parameters"], own["_buffers"], own["_modules"] = own_parameters, own_buffers, own_children
            own["_non_persistent_buffers_set"] = attributes["_non_persistent_buffers_set"].copy()
            for registry, positions in ((own_parameters, parameters), (own_buffers, buffers)):
                self._of_tensors.append(registry)
                if positions:
                    self._to_fill.append((registry, positions))
            if own_children:
                self._with_children.append(own_children)
            # Past `Module.__setattr__`, which would look for parameters in it.
            object.__setattr__(module, "__dict__", own)


class _Attributes:
    """The attributes of some modules: whether they still are what they were, but for tensors, and nobody else has them.

    To ask takes less than half of the time that new ones take, and leaves the garbage collector nothing to look at.
    """

    def __init__(self, modules: list[nn.Module], of_tensors: list[dict[str, Any]]) -> None:
        self._modules = modules
        self._own = [*map(vars, modules)]
        self._names = [*chain.from_iterable(self._own)]
        self._values = [*chain.from_iterable(map(dict.values, self._own))]
        self._children = [own["_modules"] for own in self._own]
        self._names_of_children = [*chain.from_iterable(self._children)]
        self._sets: list[set[str]] = [own["_non_persistent_buffers_set"] for own in self._own]
        self._former_sets = [*map(set, self._sets)]
        self._holders = ownership.Holders([*self._own, *of_tensors, *self._children, *self._sets])

    def is_so(self) -> bool:
        return (
            self._holders.are_the_same()
            and all(map(is_, map(vars, self._modules), self._own))
            and [*chain.from_iterable(self._own)] == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._own)), self._values))
            and [*chain.from_iterable(self._children)] == self._names_of_children
            and self._sets == self._former_sets
        )


_Positions: TypeAlias = "tuple[dict[str, Any], list[tuple[str, int]]]"
"""A registry, and which tensors of the plan are to be in it."""

_Part: TypeAlias = "tuple[dict[str, Any], list[tuple[str, int]], list[tuple[str, int]], dict[str, nn.Module | None]]"
