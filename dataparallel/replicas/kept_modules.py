"""What becomes of the module objects of replicas when a call ends: they are used again, or taken apart.

Modules of plain trees (``ModulePlan.is_plain``) are used again: before a call its tensors are put into them, and after
it everything that it left on them is removed. `CycleBreaker` takes others apart that may hold reference cycles.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

from torch import Tensor, nn

from dataparallel import ownership
from dataparallel._torch import HOOK_TABLES, OWN_HOOK_TABLES, REGISTRIES
from dataparallel.comm.streams.arrivals import Arrivals, ExpectedArrivals
from dataparallel.replicas.build import (
    bare_module,
    call_compiled,
    device_of,
    empty_hook_flags,
    own_attributes,
    parameter_registry,
    tell_units,
)
from dataparallel.replicas.plan import MADE_FOR_ATTRIBUTES, TABLES, ModuleEntry, ModulePlan
from dataparallel.replicas.references import ATOMIC, compiled_over, reached

_Registration: TypeAlias = "list[tuple[str, int]]"
"""Names in a registry, with the position of the tensor in the plan."""

_Part: TypeAlias = "tuple[dict[str, Any], _Registration, _Registration, dict[str, nn.Module | None]]"
"""One module at the start of a call: its attributes, parameters, buffers and children."""


class ReplicaModules:
    """The module objects of one replica: filled with tensors for a call, reset after it.

    ``may_be_late``: lookups of parameters wait for what the call expects; see `ParameterRegistry`.
    """

    def __init__(self, plan: ModulePlan, may_be_late: bool = False) -> None:
        self.may_be_late = may_be_late
        self._classes = [entry.cls for entry in plan.entries]
        self._modules = [bare_module(cls) for cls in self._classes]
        self._shared = plan.table([])
        self._parts: list[_Part] = []
        self._hook_tables: list[dict[Any, Any]] = []  # empty, because the tree is plain
        self._counted: list[Any] = [*self._modules]
        flags = empty_hook_flags()
        for entry in plan.entries:
            attributes = own_attributes(entry, entry.attributes.copy(), flags)
            children = {k: self._modules[i] if i >= 0 else self._shared[i] for k, i in entry.children.items()}
            self._hook_tables += [attributes[name] for name in HOOK_TABLES]
            self._counted.append(attributes[HOOK_TABLES[0]])  # a holder of a module's attributes holds this table
            self._parts.append((attributes, [*entry.parameters.items()], [*entry.buffers.items()], children))
        self._parents = [module for module, part in zip(self._modules, self._parts, strict=True) if part[-1]]
        self._children = [child for *_, children in self._parts for child in children.values()]
        self._calls = call_compiled(plan, self._modules)  # they stay with the modules
        if self._calls:
            for module, (attributes, *_) in zip(self._modules, self._parts, strict=True):
                attributes.update(vars(module))
        self._weakly_held = ownership.weak_references(self._modules)  # by the calls
        self._renew_attributes()
        self._as_made: _AttributeSnapshot | None = _AttributeSnapshot(self._modules, self._of_tensors)
        self._holders = ownership.Holders(self._counted, self._with_children)
        self._is_in_use = False

    def filled(self, tensors: list[Tensor], arrivals: Arrivals | None = None, slot: int = 0) -> nn.Module:
        """The replica with ``tensors``, for the next call on ``slot``. Needs ``arrivals`` if it may be late."""
        self._is_in_use = True
        if self._expected is not None and arrivals is not None:
            arrivals.expect(self._expected, slot, len(tensors) + len(self._shared))
        for call in self._calls:
            call.device = device_of(tensors)
        held = [*tensors, *self._shared]
        for registry, positions in self._to_fill:
            for key, i in positions:
                registry[key] = held[i]
        return self._modules[0]

    def reset(self) -> bool:
        """Removes everything that the last call put into the modules or left on them.

        Returns ``False``, and changes nothing, if somebody else holds one of the modules, or if ``forward`` has changed
        more than attributes: a class, a child, a hook.
        """
        if self._is_in_use:
            if not self._is_free():
                return False
            if self._as_made is not None and self._as_made.still_holds():
                for registry in self._of_tensors:
                    registry.clear()
            else:
                # A forward that leaves something once will do so again: from now on attributes are always renewed.
                self._as_made = None
                del self._holders  # it holds the old registries, which have to be free before holders are counted again
                self._renew_attributes()
                self._holders = ownership.Holders(self._counted, self._with_children)
            self._is_in_use = False
        return True

    def _is_free(self) -> bool:
        """True if nobody else holds a module, and classes, children and hooks are as they were."""
        return (
            self._holders.are_unchanged()
            and self._children_are_in_place()
            and ownership.weak_references(self._modules) == self._weakly_held
            and all(map(is_, map(type, self._modules), self._classes))
            and not any(self._hook_tables)
        )

    def _children_are_in_place(self) -> bool:
        """Somebody may have taken a child or a registry from its place: the number of its holders is the same then."""
        for module, registry in zip(self._parents, self._with_children, strict=True):
            if vars(module).get("_modules") is not registry:
                return False
        children = [*chain.from_iterable(map(dict.values, self._with_children))]
        return len(children) == len(self._children) and all(map(is_, children, self._children))

    def _renew_attributes(self) -> None:
        """Gives the modules new attributes and registries. Whoever holds the old ones may keep them."""
        self._to_fill: list[tuple[dict[str, Any], _Registration]] = []
        self._with_children: list[dict[str, Any]] = []  # registries of `_parents`
        self._of_tensors: list[dict[str, Any]] = []  # registries of parameters and of buffers
        # Whoever holds an old registry keeps what that one expects.
        self._expected = ExpectedArrivals() if self.may_be_late else None
        for module, (attributes, parameters, buffers, children) in zip(self._modules, self._parts, strict=True):
            own = attributes.copy()
            own_parameters = parameter_registry(dict(parameters), self._expected)
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
        tell_units(self._modules)


class _AttributeSnapshot:
    """The attributes that some modules have now, without tensors, so that a call that left them alone is recognised.

    To compare them is much faster than to renew them: renewing takes inference of small models 15 to 30 % longer.
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

    def still_holds(self) -> bool:
        """True if attributes are the same objects under the same names, and nobody else holds their containers."""
        return (
            self._holders.are_unchanged()
            and all(map(is_, map(vars, self._modules), self._own))
            and [*chain.from_iterable(self._own)] == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._own)), self._values))
            and [*chain.from_iterable(self._children)] == self._names_of_children
            and self._sets == self._former_sets
        )


class TreeSnapshot:
    """The tree from which ``plan`` was made, compared with a later one so that the plan can be used again.

    It compares the modules, and the names and the identity of their attributes. It looks into objects that change in
    place: registries, hooks, containers, functions. It does not compare shape, dtype, device or values of tensors:
    `KeptCopies` does. It does not look into modules that replicas share with the source, which are in no plan.
    """

    def __init__(self, plan: ModulePlan) -> None:
        self.plan, self._root = plan, plan.entries[0].module
        self._known = {id(entry.module) for entry in plan.entries} | {id(tensor) for tensor in plan.tensors}
        self._known.add(plan.source_id)
        self._modules = [_ModuleSnapshot(entry) for entry in plan.entries]

    def still_holds(self, network: nn.Module) -> bool:
        """True if the plan of ``network`` would be the same."""
        return network is self._root and all(module.still_holds(self._known) for module in self._modules)


class _ModuleSnapshot:
    """One module, without hooks."""

    def __init__(self, entry: ModuleEntry) -> None:
        attributes = entry.attributes
        not_looked_into = {*REGISTRIES, *HOOK_TABLES, "_non_persistent_buffers_set", *entry.left_out}
        self._module, self._cls = entry.module, entry.cls
        self._names, self._values = tuple(attributes), tuple(attributes.values())
        self._registered = [(name, tuple(attributes[name]), tuple(attributes[name].values())) for name in REGISTRIES]
        self._non_persistent = frozenset(attributes["_non_persistent_buffers_set"])
        # Attributes that can change in place and then lead into the tree.
        self._looked_into = [
            name for name, value in attributes.items() if name not in not_looked_into and not _is_immutable(value)
        ]

    def still_holds(self, known: set[int]) -> bool:
        now = vars(self._module)
        if (
            type(self._module) is not self._cls
            or tuple(now) != self._names
            or not all(map(is_, now.values(), self._values))
        ):
            return False
        if any(map(now.__getitem__, HOOK_TABLES)) or now["_non_persistent_buffers_set"] != self._non_persistent:
            return False
        for name, keys, values in self._registered:
            registry = now[name]
            if keys:
                if tuple(registry) != keys or not all(map(is_, registry.values(), values)):
                    return False
            elif registry:
                return False
        for name in self._looked_into:
            value = now[name]
            if type(value) not in TABLES or value:
                items = reached(value)
                if any(id(item) in known for item in items) or compiled_over(items, known):
                    return False
        return True


def _is_immutable(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(type(item) in ATOMIC for item in value)
    return type(value) in ATOMIC


# ---- replicas that are not used again --------------------------------------------------------------------------------


class CycleBreaker:
    """Takes replicas apart if they may hold cycles and nothing else holds a part of them.

    A bound method or a reference to the parent makes a cycle in the source, which lives long, and in each replica,
    which lives for one forward: copies of all weights would wait for the collector. If something else holds a part (a
    checkpoint runs methods again in backward), the replica is tried again at the end of the next call, or left to the
    collector. If the call fails, the breaker lives as long as a traceback of the failure. It keeps nothing alive.
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
