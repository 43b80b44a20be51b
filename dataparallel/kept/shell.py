"""The module objects of one replica, which calls use one after the other.

A call's tensors are put into them before it, and what it has left on them is taken off after it, provided that nobody
else holds one of them. Only ``kept.replicas`` uses this room.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any, TypeAlias

from torch import Tensor, nn

from dataparallel import ownership
from dataparallel._torch import HOOK_TABLES
from dataparallel.modules.build import bare_module, hook_flags, own_attributes
from dataparallel.modules.plan import ModulePlan

__all__ = ["Shell"]


class Shell:
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
