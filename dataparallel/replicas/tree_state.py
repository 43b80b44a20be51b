"""`TreeState` tells if other code has changed the attributes of a tree's modules since. It is asked at each call.

It compares identities and looks into no value. `TreeSnapshot` uses it for the source,
and tells if a plan of the tree still holds; ``kept_modules`` uses it for replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.replicas.plan import TABLES, ModulePlan
from dataparallel.replicas.references import ATOMIC, compiled_over, reached


class Contents:
    """The keys and values of some dicts. They are compared as one list, by functions in C: there are thousands."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._lengths = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(map(dict.keys, dicts))]
        self._values = [*chain.from_iterable(map(dict.values, dicts))]

    def sizes_are_those_of(self, dicts: Sequence[dict[str, Any]]) -> bool:
        """True if each of ``dicts`` has as many keys."""
        return [*map(len, dicts)] == self._lengths

    def are_in(self, dicts: Sequence[dict[str, Any]]) -> bool:
        """True if each of ``dicts`` has the same keys and the very same values, in the same order."""
        return (
            self.sizes_are_those_of(dicts)
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), self._values))
            and [*chain.from_iterable(map(dict.keys, dicts))] == self._keys
        )


class TreeState:
    """The classes and attributes of some modules, and what is in their registries. They have no hooks.

    ``registries``: names of the registries whose contents count: ``_parameters``, ``_buffers``, ``_modules``.
    """

    def __init__(self, modules: Sequence[nn.Module], registries: Sequence[str]) -> None:
        self._modules, self._classes = modules, [*map(type, modules)]
        attributes = [*map(vars, modules)]
        self._attributes = Contents(attributes)
        # The attributes refer to all that follows, so it cannot be replaced unnoticed.
        tables = [own[name] for own in attributes for name in registries]
        self._registries = [table for table in tables if table]
        self._registered = Contents(self._registries)
        sets = [own["_non_persistent_buffers_set"] for own in attributes]
        self._sets = [(names, names.copy()) for names in sets if names]
        hooks = [own[name] for own in attributes for name in HOOK_TABLES]
        self._empty = [each for each in (*tables, *sets, *hooks) if not each]

    def is_of_same_size(self) -> bool:
        """True if each module has as many attributes as it had. Much cheaper than `is_unchanged`."""
        return self._attributes.sizes_are_those_of([*map(vars, self._modules)])

    def is_unchanged(self) -> bool:
        """True if all of it is as it was."""
        return (
            all(map(is_, map(type, self._modules), self._classes))
            and self._attributes.are_in([*map(vars, self._modules)])
            and self._registered.are_in(self._registries)
            and not any(self._empty)
            and all(names == before for names, before in self._sets)
        )


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
