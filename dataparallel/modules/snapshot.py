"""Compares a module tree with the tree from which a plan was made, so that the plan can be used again.

It compares the modules of the tree, and the names and the identity of their attributes. It looks into objects that
change in place: registries, hooks, containers, functions. It does not compare shape, dtype, device or values of
tensors: ``kept.tensors`` does, when it copies them. It does not look into modules that replicas share with the source,
which are in no plan. Only ``kept.replicas`` uses this room.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.modules.plan import TABLES, ModuleEntry, ModulePlan
from dataparallel.modules.references import ATOMIC, compiled_over, reached

__all__ = ["TreeSnapshot"]


class TreeSnapshot:
    """The tree from which a plain plan was made (``ModulePlan.is_plain``)."""

    def __init__(self, plan: ModulePlan) -> None:
        self._root = plan.entries[0].module
        self._known = {id(entry.module) for entry in plan.entries} | {id(tensor) for tensor in plan.tensors}
        self._known.add(plan.source_id)
        self._modules = [_ModuleSnapshot.of(entry) for entry in plan.entries]

    def still_holds(self, network: nn.Module) -> bool:
        """True if the plan of ``network`` would be the same."""
        return network is self._root and all(module.still_holds(self._known) for module in self._modules)


@dataclass
class _ModuleSnapshot:
    """One module. ``looked_into`` names the attributes that can change in place and then lead into the tree."""

    module: nn.Module
    cls: type[nn.Module]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    registered: list[tuple[str, tuple[str, ...], tuple[Any, ...]]]
    non_persistent: frozenset[str]
    looked_into: list[str]

    @classmethod
    def of(cls, entry: ModuleEntry) -> _ModuleSnapshot:
        attributes = entry.attributes
        not_looked_into = {*REGISTRIES, *HOOK_TABLES, "_non_persistent_buffers_set", *entry.left_out}
        return cls(
            module=entry.module,
            cls=entry.cls,
            names=tuple(attributes),
            values=tuple(attributes.values()),
            registered=[(name, tuple(attributes[name]), tuple(attributes[name].values())) for name in REGISTRIES],
            non_persistent=frozenset(attributes["_non_persistent_buffers_set"]),
            looked_into=[
                name for name, value in attributes.items() if name not in not_looked_into and not _is_immutable(value)
            ],
        )

    def still_holds(self, known: set[int]) -> bool:
        now = vars(self.module)
        if (
            type(self.module) is not self.cls
            or tuple(now) != self.names
            or not all(map(is_, now.values(), self.values))
        ):
            return False
        if any(map(now.__getitem__, HOOK_TABLES)) or now["_non_persistent_buffers_set"] != self.non_persistent:
            return False
        for name, keys, values in self.registered:
            registry = now[name]
            if keys:
                if tuple(registry) != keys or not all(map(is_, registry.values(), values)):
                    return False
            elif registry:
                return False
        for name in self.looked_into:
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
