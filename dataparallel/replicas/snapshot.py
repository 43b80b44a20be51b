"""`TreeSnapshot` tells if a plan that was made at an earlier call still describes the tree: plans take time to make."""

from __future__ import annotations

from typing import Any

from torch import nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.replicas.plan import TABLES, ModulePlan
from dataparallel.replicas.references import ATOMIC, compiled_over, reached
from dataparallel.replicas.tree_state import TreeState


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
        self._state = TreeState([entry.module for entry in plan.entries], REGISTRIES)
        # Attributes that can change in place and then refer to the tree. Most are empty tables.
        self._tables: list[Any] = []
        self._others: list[Any] = []
        for entry in plan.entries:
            not_looked_into = {*REGISTRIES, *HOOK_TABLES, "_non_persistent_buffers_set", *entry.left_out}
            values = ((name, value) for name, value in entry.attributes.items() if name not in not_looked_into)
            for name, value in (pair for pair in values if not _is_immutable(pair[1])):
                owner = entry.method_owner(name, value)
                value = value if owner is None else vars(owner)
                (self._tables if type(value) in TABLES else self._others).append(value)

    def still_holds(self, network: nn.Module) -> bool:
        """True if the plan of ``network`` would be the same."""
        return (
            network is self._root
            and self._state.is_unchanged()
            and not any(map(self._leads_to_tree, (*filter(None, self._tables), *self._others)))
        )

    def _leads_to_tree(self, value: Any) -> bool:
        items = reached(value)
        return any(id(item) in self._ids for item in items) or compiled_over(items, self._ids)


def _is_immutable(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(type(item) in ATOMIC for item in value)
    return type(value) in ATOMIC
