"""`Stamp` tells if other code has changed modules or tensors since it was taken, as each call asks before it uses
again what was made from them. It compares identities, versions and addresses, and looks into no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.comm.buckets import PLAIN_TYPES, has_strides
from dataparallel.comm.kinds import inner_tensors
from dataparallel.replicas.plan import TABLES, ModulePlan
from dataparallel.replicas.references import ATOMIC, compiled_over, reached

# Functions in C: they are called for thousands of tensors at each call.
_LAYOUT: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
    Tensor.is_conj,
)
_KIND = attrgetter("shape", "dtype", "device")


class Stamp:
    """The classes and attributes of some modules, and what is in their registries and tables of hooks.

    ``registries``: names of the registries whose contents count: ``_parameters``, ``_buffers``, ``_modules``.
    """

    def __init__(self, modules: Sequence[nn.Module], registries: Sequence[str] = REGISTRIES) -> None:
        self._modules = modules
        # The attributes refer to these tables, so none is replaced unnoticed. Most are empty.
        tables = [vars(module)[name] for module in modules for name in (*registries, *HOOK_TABLES)]
        names = [vars(module)["_non_persistent_buffers_set"] for module in modules]
        self._filled, self._not_persistent = [*filter(None, tables)], [*filter(None, names)]
        self._empty = [each for each in (*tables, *names) if not each]
        self._seen, self._values = self._look()

    def _look(self) -> tuple[tuple[list[Any], ...], list[Any]]:
        dicts = [*map(vars, self._modules), *self._filled]
        seen = (
            [*map(type, self._modules)],
            [*map(len, dicts)],
            [*chain.from_iterable(map(dict.keys, dicts))],
            [*map(frozenset, self._not_persistent)],
        )
        return seen, [*chain.from_iterable(map(dict.values, dicts))]

    def holds(self) -> bool:
        seen, values = self._look()
        return seen == self._seen and all(map(is_, values, self._values)) and not any(self._empty)

    def sizes_hold(self) -> bool:
        """True if each module has as many attributes as it had. Much cheaper than `holds`."""
        return [*map(len, map(vars, self._modules))] == self._seen[1][: len(self._modules)]


def layouts_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Where the memory of strided tensors is, and how they lie there."""
    return [list(map(read, tensors)) for read in _LAYOUT]


def kinds_of(tensors: Sequence[Tensor]) -> list[Any]:
    """All properties of tensors that copies depend on. ``.data =`` may change them in the same tensor."""
    dense = [tensor for tensor in tensors if has_strides(tensor)]
    return [
        len(dense),
        *map(type, tensors),
        *map(_KIND, tensors),
        *map(Tensor.stride, dense),
        *map(Tensor.data_ptr, dense),
        *[kinds_of([*inner_tensors(tensor).values()]) for tensor in tensors if type(tensor) not in PLAIN_TYPES],
    ]


class PlanStamp:
    """The tree from which ``plan`` was made. It tells if the plan still describes the tree at a later call.

    It looks into objects that change in place: registries, hooks, containers, functions. It does not compare shape,
    dtype, device or values of tensors, which each call reads anew. It does not look into modules that replicas share
    with the source: no plan has them.
    """

    def __init__(self, plan: ModulePlan) -> None:
        self.plan, self._root = plan, plan.entries[0].module
        self._ids = {id(entry.module) for entry in plan.entries} | {id(tensor) for tensor in plan.tensors}
        self._ids.add(plan.source_id)
        self._modules = Stamp([entry.module for entry in plan.entries])
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

    def holds(self, network: nn.Module) -> bool:
        return (
            network is self._root
            and self._modules.holds()
            and not any(map(self._leads_to_tree, (*filter(None, self._tables), *self._others)))
        )

    def _leads_to_tree(self, value: Any) -> bool:
        items = reached(value)
        return any(id(item) in self._ids for item in items) or compiled_over(items, self._ids)


def _is_immutable(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(type(item) in ATOMIC for item in value)
    return type(value) in ATOMIC
