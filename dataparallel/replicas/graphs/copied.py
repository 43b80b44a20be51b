"""`copy_for_capture`: the copy of a module that a capture runs, with leaves in the place of its parameters.

The module itself stays as it is, so other threads may call it meanwhile. ``captured`` uses this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from dataparallel.replicas.build import bare_module, give_attributes
from dataparallel.replicas.compiled.calls import CALL, CompiledCall, call_inside, compiled_calls
from dataparallel.replicas.graphs.pieces import CapturedPieces, current_pieces, is_part
from dataparallel.replicas.plan import instance_slots


def copy_for_capture(root: nn.Module, pieces: CapturedPieces) -> Any:
    """A copy of a tree whose modules differ in tensors and children only. It shares buffers and other attributes."""
    modules = [*root.modules()]
    copies = {id(module): bare_module(type(module)) for module in modules}
    calls = {id(module): compiled_calls(module) for module in modules}
    compiled = [call.module for found in calls.values() for call in found.values() if call.functions is not None]
    traced = {id(child) for module in compiled for child in module.modules()}
    for number, module in enumerate(modules):
        copy, own = copies[id(module)], vars(module).copy()
        leaves = pieces.leaves_of(own["_parameters"])
        # Compiled code looks at the types of what it has traced.
        own["_parameters"] = leaves if id(module) in traced else _Lookups(leaves, number, pieces)
        own["_modules"] = {name: copies.get(id(child), child) for name, child in own["_modules"].items()}
        own.pop(CALL, None)
        own.update({name: call.of(copies[id(call.module)]) for name, call in calls[id(module)].items()})
        if is_part(module) and module is not root:
            own[CALL] = _PartCall(copy, own.get(CALL))
        give_attributes(copy, own, module, instance_slots(type(module)))
    return copies[id(root)]


class _PartCall:
    """Calls a part of the copy, where a piece may begin. It refers to the part weakly, because the part holds it."""

    def __init__(self, part: nn.Module, compiled: CompiledCall | None) -> None:
        self._part, self.compiled = weakref.ref(part), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part: Any = self._part()
        pieces = current_pieces()  # none in a backward, where a checkpoint runs the part again
        if pieces is not None:
            pieces.part_begins(part, args, kwargs)
        return call_inside(part, *args, **kwargs)


class _Lookups(dict[str, Any]):
    """The leaves of a module of the copy.

    `Module.__getattr__` looks them up one by one, and gets those of the piece.
    """

    def __init__(self, leaves: dict[str, Any], number: int, pieces: CapturedPieces) -> None:
        super().__init__(leaves)
        self._number, self._pieces = number, pieces

    def __getitem__(self, name: str) -> Any:
        self._pieces.note_use(self._number)
        return self._pieces.leaf_for(super().__getitem__(name))

    def _all(self) -> dict[str, Any]:
        self._pieces.note_use(self._number)
        return {name: dict.__getitem__(self, name) for name in dict.keys(self)}

    def get(self, name: str, default: Any = None) -> Any:
        return self._all().get(name, default)

    def items(self) -> Any:
        return self._all().items()

    def values(self) -> Any:
        return self._all().values()

    def copy(self) -> dict[str, Any]:
        return self._all()

    def __iter__(self) -> Iterator[str]:
        # ``dict(lookups)`` and ``**lookups`` look every value up because this method exists.
        return iter(self._all())
