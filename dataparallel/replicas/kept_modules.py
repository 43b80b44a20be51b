"""`ReplicaModules` uses the module objects of a replica again, and `CycleBreaker` takes other replicas apart.

Modules of plain trees (``ModulePlan.is_plain``) are used again: they are filled with tensors before a call, and reset
after it. Replicas of other trees may hold reference cycles, which are broken when the call ends.
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
"""The names in a registry, each with its tensor's position in the plan."""

_Template: TypeAlias = "tuple[dict[str, Any], _Registration, _Registration, dict[str, nn.Module | None]]"
"""One module at the start of a call: its attributes, parameters, buffers and children."""


class ReplicaModules:
    """The module objects of one replica: `fill` puts a call's tensors into them, `reset` removes what the call left.

    ``may_be_late``: parameters may arrive during the call, and lookups wait for them; see `ParameterRegistry`.
    """

    def __init__(self, plan: ModulePlan, may_be_late: bool = False) -> None:
        self.may_be_late = may_be_late
        self._classes = [entry.cls for entry in plan.entries]
        self._modules = [bare_module(cls) for cls in self._classes]
        self._shared = plan.table([])
        self._templates: list[_Template] = []
        self._hook_tables: list[dict[Any, Any]] = []  # empty tables, because the tree is plain
        self._counted: list[Any] = [*self._modules]  # objects whose holders are counted
        flags = empty_hook_flags()
        for entry in plan.entries:
            attributes = own_attributes(entry, entry.attributes.copy(), flags)
            children = {k: self._modules[i] if i >= 0 else self._shared[i] for k, i in entry.children.items()}
            self._hook_tables += [attributes[name] for name in HOOK_TABLES]
            self._counted.append(attributes[HOOK_TABLES[0]])  # a holder of a module's attributes holds this table
            self._templates.append((attributes, [*entry.parameters.items()], [*entry.buffers.items()], children))
        self._parents = [self._modules[i] for i, entry in enumerate(plan.entries) if entry.children]
        self._children = [child for *_, children in self._templates for child in children.values()]
        self._compiled_calls = call_compiled(plan, self._modules)  # they stay with the modules
        if self._compiled_calls:
            for module, (attributes, *_) in zip(self._modules, self._templates, strict=True):
                attributes.update(vars(module))
        self._weak_references = ownership.weak_references(self._modules)  # of the compiled calls
        self._renew_attributes()
        self._snapshot: _AttributeSnapshot | None = _AttributeSnapshot(self._modules, self._tensor_registries)
        self._holders = ownership.Holders(self._counted, self._child_registries)
        self._is_in_use = False

    def fill(self, tensors: list[Tensor], arrivals: Arrivals | None = None, slot: int = 0) -> nn.Module:
        """Returns the replica with ``tensors``, for a call on ``slot``. With ``may_be_late`` it needs ``arrivals``."""
        self._is_in_use = True
        if self._expected is not None and arrivals is not None:
            arrivals.expect(self._expected, slot, len(tensors) + len(self._shared))
        for call in self._compiled_calls:
            call.device = device_of(tensors)
        table = [*tensors, *self._shared]
        for registry, positions in self._to_fill:
            for key, i in positions:
                registry[key] = table[i]
        return self._modules[0]

    def reset(self) -> bool:
        """Removes everything that the last call put into the modules or left on them.

        Returns ``False``, and changes nothing, if other code holds one of the modules, or if ``forward`` has changed
        more than attributes: a class, a child, a hook.
        """
        if self._is_in_use:
            if not self._is_free():
                return False
            if self._snapshot is not None and self._snapshot.still_holds():
                for registry in self._tensor_registries:
                    registry.clear()
            else:
                # A forward that changes attributes once will do so again: from now on attributes are always renewed.
                self._snapshot = None
                del self._holders  # it holds the old registries, which have to be free before holders are counted again
                self._renew_attributes()
                self._holders = ownership.Holders(self._counted, self._child_registries)
            self._is_in_use = False
        return True

    def _is_free(self) -> bool:
        """True if no other code holds a module, and classes, children and hooks are as they were."""
        return (
            self._holders.are_unchanged()
            and self._children_are_in_place()
            and ownership.weak_references(self._modules) == self._weak_references
            and all(map(is_, map(type, self._modules), self._classes))
            and not any(self._hook_tables)
        )

    def _children_are_in_place(self) -> bool:
        """False if ``forward`` has moved a child or a registry to other code, which leaves its number of holders."""
        for module, registry in zip(self._parents, self._child_registries, strict=True):
            if vars(module).get("_modules") is not registry:
                return False
        children = [*chain.from_iterable(map(dict.values, self._child_registries))]
        return len(children) == len(self._children) and all(map(is_, children, self._children))

    def _renew_attributes(self) -> None:
        """Gives the modules new attributes and registries. Other code may keep the old ones."""
        self._to_fill: list[tuple[dict[str, Any], _Registration]] = []
        self._child_registries: list[dict[str, Any]] = []  # registries of `_parents`
        self._tensor_registries: list[dict[str, Any]] = []  # registries of parameters and of buffers
        # A new object, because other code that holds an old registry waits for what the old object expects.
        self._expected = ExpectedArrivals() if self.may_be_late else None
        for module, (attributes, parameters, buffers, children) in zip(self._modules, self._templates, strict=True):
            own = attributes.copy()
            own_parameters = parameter_registry(dict(parameters), self._expected)
            own_buffers: dict[str, Any] = {}
            own_children = children.copy()
            own["_parameters"], own["_buffers"], own["_modules"] = own_parameters, own_buffers, own_children
            own["_non_persistent_buffers_set"] = attributes["_non_persistent_buffers_set"].copy()
            for registry, positions in ((own_parameters, parameters), (own_buffers, buffers)):
                self._tensor_registries.append(registry)
                if positions:
                    self._to_fill.append((registry, positions))
            if own_children:
                self._child_registries.append(own_children)
            # `Module.__setattr__` would search the value for parameters.
            object.__setattr__(module, "__dict__", own)
        tell_units(self._modules)


class _AttributeSnapshot:
    """The attributes of modules before a call, without tensors. After the call it tells if they are unchanged.

    Comparing attributes is much faster than renewing them, which makes inference of small models 15 to 30 % slower.
    """

    def __init__(self, modules: list[nn.Module], tensor_registries: list[dict[str, Any]]) -> None:
        self._modules = modules
        self._own = [*map(vars, modules)]
        self._names = [*chain.from_iterable(self._own)]
        self._values = [*chain.from_iterable(map(dict.values, self._own))]
        self._children = [own["_modules"] for own in self._own]
        self._names_of_children = [*chain.from_iterable(self._children)]
        self._sets: list[set[str]] = [own["_non_persistent_buffers_set"] for own in self._own]
        self._former_sets = [*map(set, self._sets)]
        self._holders = ownership.Holders([*self._own, *tensor_registries, *self._children, *self._sets])

    def still_holds(self) -> bool:
        """True if attributes are the same objects under the same names, and no other code holds their containers."""
        return (
            self._holders.are_unchanged()
            and all(map(is_, map(vars, self._modules), self._own))
            and [*chain.from_iterable(self._own)] == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._own)), self._values))
            and [*chain.from_iterable(self._children)] == self._names_of_children
            and self._sets == self._former_sets
        )


class TreeSnapshot:
    """The tree from which ``plan`` was made. It tells if the plan still describes the tree at a later call.

    It compares the modules, and the names and the identity of their attributes. It looks into objects that change in
    place: registries, hooks, containers, functions. It does not compare shape, dtype, device or values of tensors,
    which `KeptCopies` does. It does not look into modules that replicas share with the source: no plan has them.
    """

    def __init__(self, plan: ModulePlan) -> None:
        self.plan, self._root = plan, plan.entries[0].module
        self._ids = {id(entry.module) for entry in plan.entries} | {id(tensor) for tensor in plan.tensors}
        self._ids.add(plan.source_id)
        self._modules = [_ModuleSnapshot(entry) for entry in plan.entries]

    def still_holds(self, network: nn.Module) -> bool:
        """True if the plan of ``network`` would be the same."""
        return network is self._root and all(module.still_holds(self._ids) for module in self._modules)


class _ModuleSnapshot:
    """One module of a `TreeSnapshot`. It has no hooks."""

    def __init__(self, entry: ModuleEntry) -> None:
        attributes = entry.attributes
        not_looked_into = {*REGISTRIES, *HOOK_TABLES, "_non_persistent_buffers_set", *entry.left_out}
        self._module, self._cls = entry.module, entry.cls
        self._names, self._values = tuple(attributes), tuple(attributes.values())
        self._registered = [(name, tuple(attributes[name]), tuple(attributes[name].values())) for name in REGISTRIES]
        self._non_persistent = frozenset(attributes["_non_persistent_buffers_set"])
        # Attributes that can change in place and then refer to the tree.
        self._looked_into = [
            name for name, value in attributes.items() if name not in not_looked_into and not _is_immutable(value)
        ]

    def still_holds(self, tree_ids: set[int]) -> bool:
        attributes = vars(self._module)
        if (
            type(self._module) is not self._cls
            or tuple(attributes) != self._names
            or not all(map(is_, attributes.values(), self._values))
        ):
            return False
        non_persistent = attributes["_non_persistent_buffers_set"]
        if any(map(attributes.__getitem__, HOOK_TABLES)) or non_persistent != self._non_persistent:
            return False
        for name, keys, values in self._registered:
            registry = attributes[name]
            if keys:
                if tuple(registry) != keys or not all(map(is_, registry.values(), values)):
                    return False
            elif registry:
                return False
        for name in self._looked_into:
            value = attributes[name]
            if type(value) not in TABLES or value:
                items = reached(value)
                if any(id(item) in tree_ids for item in items) or compiled_over(items, tree_ids):
                    return False
        return True


def _is_immutable(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(type(item) in ATOMIC for item in value)
    return type(value) in ATOMIC


# ---- replicas that are not used again --------------------------------------------------------------------------------


class CycleBreaker:
    """Takes replicas apart that may hold reference cycles, if no other code holds an object of the replica.

    A bound method or a reference to the parent makes a cycle, in the source and so in each replica. A replica lives for
    one forward, but with a cycle its copies of all weights would live until the garbage collector runs. If other code
    holds an object of it (a checkpoint calls methods again in backward), the end of the next call tries again, and the
    collector frees the rest. If a call fails, the failure's traceback holds the breaker. It keeps no replica alive.
    """

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        trusted = ownership.are_counts_trusted()
        self._roots = [weakref.ref(replica) for replica in replicas if trusted and MADE_FOR_ATTRIBUTES in vars(replica)]

    def __del__(self) -> None:
        self.take_apart()

    def take_apart(self) -> None:
        """Takes apart the replicas of this call, and replicas that were in use when an earlier call ended."""
        roots, self._roots = self._roots, []
        while _in_use:
            try:
                roots.append(_in_use.popleft())
            except IndexError:  # another thread has taken the last one
                break
        for root in roots:
            if not _take_apart(root):
                _in_use.append(root)


_in_use: deque[weakref.ref[nn.Module]] = deque(maxlen=256)  # roots of replicas that were in use when their call ended


def _take_apart(root: weakref.ref[nn.Module]) -> bool:
    """Returns ``False`` if other code holds an object of the replica."""
    objects = _objects_of(root)
    if not _hold_only_each_other(objects):
        return False
    for each in objects:
        if issubclass(type(each), nn.Module):
            vars(each).clear()
    return True


def _objects_of(root: weakref.ref[nn.Module]) -> list[Any]:
    """Returns the modules of a replica, and the objects that were made for their attributes."""
    replica = root()
    return [] if replica is None else [*replica.modules(), *vars(replica)[MADE_FOR_ATTRIBUTES]]


def _hold_only_each_other(objects: list[Any]) -> bool:
    """True if ``objects`` are referenced only by each other and by this list.

    The number of references to each object is compared with the number of references from the others. Code that holds
    a registry, or a view of a registry, holds the module's children: so the registries are counted too.
    """
    if not ownership.are_counts_trusted():
        return False
    modules = [each for each in objects if issubclass(type(each), nn.Module)]
    made = [each for each in objects if not issubclass(type(each), nn.Module)]
    attributes = [vars(module) for module in modules]
    names = (*REGISTRIES, *OWN_HOOK_TABLES)
    made_ids = set(map(id, made))  # new hook tables are among ``made``
    tables = [own[name] for own in attributes for name in names if name in own and id(own[name]) not in made_ids]
    made_lists = [own[MADE_FOR_ATTRIBUTES] for own in attributes if MADE_FOR_ATTRIBUTES in own]
    holders = {id(holder): holder for holder in (*attributes, *tables, *made, *made_lists)}
    inside = ownership.references_inside(holders.values())
    # Besides ``objects``, one list here refers to each of these objects; holders are in a dict too.
    extra = ownership.references_of_one()
    control = nn.Module()
    (owned,) = ownership.references([vars(control)])
    return (
        all(count == inside[key] + extra + 1 for key, count in _reference_counts(modules))
        and all(count == inside[key] + extra + 2 for key, count in _reference_counts(made))
        and all(count == inside[key] + extra + 1 for key, count in _reference_counts(tables))
        and all(count == owned + 1 for _, count in _reference_counts(attributes))
    )


def _reference_counts(objects: list[Any]) -> list[tuple[int, int]]:
    return [*zip(map(id, objects), ownership.references(objects), strict=True)]
