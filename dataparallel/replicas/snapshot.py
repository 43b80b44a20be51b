"""`TreeSnapshot` tells if a plan that was made at an earlier call still describes the tree: plans take time to make."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.replicas.plan import TABLES, ModuleEntry, ModulePlan
from dataparallel.replicas.references import ATOMIC, compiled_over, reached


class TreeSnapshot:
    """The tree from which ``plan`` was made. It tells if the plan still describes the tree at a later call.

    It compares the modules, and the names and the identity of their attributes. It looks into objects that change in
    place: registries, hooks, containers, functions. It does not compare shape, dtype, device or values of tensors,
    which each call reads anew. It does not look into modules that replicas share with the source: no plan has them.
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
