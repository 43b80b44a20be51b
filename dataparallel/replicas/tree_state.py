"""`TreeState` tells if other code has changed the attributes of a tree's modules since. It is asked at each call.

It compares identities and looks into no value. ``snapshot`` uses it for the source, ``kept_modules`` for replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from dataparallel._torch import HOOK_TABLES


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
