"""`UnitTensors` gives replicas of a fully sharded tree their tensors; `_CompiledParts` compiles code inside units only.

A replica's parameters are its units' tensors on its slot (``units.slot_unit``), which are empty between calls. Each
call sends buffers to the slots; the first slot has the module's own. The copies are new, except where captured graphs
read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.forms.managed import has_forward
from dataparallel.replicas.compiled.calls import CALL, CompileArgument, Compiled, compiled_in_place
from dataparallel.replicas.kept_replicas import TensorStore
from dataparallel.replicas.kept_values import CurrentValues
from dataparallel.replicas.plan import UNIT_MODULE, ModulePlan, names_of
from dataparallel.replicas.references import Rebinding, reached
from dataparallel.replicas.replicate import Copies
from dataparallel.replicas.stamp import kinds_of
from dataparallel.sharded.units.bindings import UnitModule
from dataparallel.sharded.units.tree import RootCall, Unit


class UnitTensors(TensorStore):
    """``tops``: the modules of each unit. ``compile``: how it is. ``keeps_buffers``: copies stay where they are."""

    are_copies = False

    def __init__(
        self,
        units: Sequence[Unit],
        tops: Sequence[Sequence[nn.Module]],
        compile: Sequence[CompileArgument | None],
        keeps_buffers: bool,
    ) -> None:
        self._keeps_buffers = keeps_buffers
        self._buffers: list[list[Tensor]] = []  # for each slot the copies that stay
        self._sources: list[Any] = []  # what they are copies of
        self._values: CurrentValues | None = None
        self._units, self._compile = list(units), list(compile)
        self._modules = [[weakref.ref(module) for module in modules] for modules in tops]
        # Of the plan of the last call: for each tensor that is in a unit the unit, and the parameter's number.
        self._plan: ModulePlan | None = None
        self._in_units: dict[int, tuple[Unit, int]] = {}
        self._outer_references: list[tuple[str, str, list[Unit]]] = []

    def for_call(self, copies: Copies) -> list[list[Tensor]]:
        """See `TensorStore.for_call`. Only buffers are sent. Other tensors that need gradients have to be in a unit."""
        plan = copies.plan
        if plan is not self._plan:
            self._read(plan)
            self._plan = plan
        for slot, tensors in enumerate(copies.by_slot):
            for i, (unit, number) in self._in_units.items():
                tensors[i] = unit.slot_units[slot].parameters[number]
        buffers = [i for i in range(len(plan.tensors)) if i not in self._in_units]
        for i in buffers:
            if copies.record and plan.tensors[i].requires_grad:
                raise _not_sharded(plan, i)
        if self._keeps_buffers:
            copies.put(buffers, self._kept_buffers([plan.tensors[i] for i in buffers], copies.slots, copies.cap_bytes))
        else:
            copies.send_buffers(buffers)
        return copies.by_slot

    def _kept_buffers(self, sources: list[Tensor], slots: list[torch.device], cap_bytes: int) -> list[list[Tensor]]:
        """Gives buffers their values where the last call had them: captured graphs read them there."""
        kinds = [*map(id, sources), *kinds_of(sources)]
        if self._values is not None and self._sources == kinds and len(slots) <= len(self._buffers):
            self._values.refresh()
        else:
            self._sources = kinds
            self._buffers = comm.broadcast_coalesced(sources, slots, cap_bytes, own_storage=True)
            self._values = CurrentValues(sources, slots, self._buffers)
            self._values.send_at_each_forward([*range(len(sources))], cap_bytes, True)
            self._values.note_versions()
        return self._buffers[: len(slots)]

    def clear(self) -> None:
        """Drops the replicas. The parameters belong to the units."""
        self.replicas = self._values = self._plan = None

    def bind(self, replicas: Sequence[nn.Module], call: RootCall) -> None:
        """Lets units' modules in new replicas gather parameters in ``call``, and registers sharded parameters there."""
        for slot, replica in enumerate(replicas):
            root: UnitModule = vars(replica)[UNIT_MODULE]
            for each in (root, *root.lower_unit_modules):
                each.begin_call(self._units[each.unit_number], slot, call)
            modules = dict(replica.named_modules()) if self._outer_references else {}
            for path, key, units in self._outer_references:
                attributes = modules[path].__dict__
                sharded_by_id = {
                    id(full): sharded
                    for unit in units
                    for full, sharded in zip(unit.slot_units[slot].parameters, unit.parameters, strict=True)
                }
                attributes[key] = Rebinding(sharded_by_id).rebound(attributes[key])

    def _read(self, plan: ModulePlan) -> None:
        """Of a unit, modules and parameters count that have not been replaced or removed."""
        numbers = {id(p): (unit, number) for unit in self._units for number, p in enumerate(unit.parameters)}
        self._in_units = {i: numbers[id(tensor)] for i, tensor in enumerate(plan.tensors) if id(tensor) in numbers}
        positions = {id(entry.module): position for position, entry in enumerate(plan.entries)} | {plan.source_id: 0}
        registries = {id(entry.module._parameters): position for position, entry in enumerate(plan.entries)}
        arguments: dict[int, CompileArgument | None] = {}
        paths: dict[Unit, list[str]] = {}
        for unit_number, (unit, modules) in enumerate(zip(self._units, self._modules, strict=True)):
            entries = [(id(own), name, i) for own, name, i in unit.registries.entries]
            places = [(registries[own], name, i) for own, name, i in entries if own in registries]
            tops = [positions[found] for found in (id(module()) for module in modules) if found in positions]
            paths[unit] = [plan.entries[top].name for top in tops]
            for number, top in enumerate(tops):
                plan.entries[top].attributes[UNIT_MODULE] = UnitModule(unit_number, number, places)
                arguments[top] = self._compile[unit_number]
        _CompiledParts(plan, arguments).choose()
        self._outer_references = self._find_outer_references(plan, paths) if plan.has_references else []

    def _find_outer_references(
        self, plan: ModulePlan, paths: Mapping[Unit, Sequence[str]]
    ) -> list[tuple[str, str, list[Unit]]]:
        """Finds attributes of modules outside of a unit that refer to its parameters: path, name, units.

        The user's code may read them while the unit has no memory, which would crash the process. In replicas they
        refer to the sharded parameters, whose operators raise.
        """
        unit_of = {id(parameter): unit for unit in self._units for parameter in unit.parameters}
        references = []
        for entry in plan.entries:
            for key in entry.references:
                found = {unit_of[id(item)] for item in reached(entry.attributes[key]) if id(item) in unit_of}
                units = [unit for unit in self._units if unit in found and not _is_below(entry.name, paths[unit])]
                if units:
                    references.append((entry.name, key, units))
        return references


def _not_sharded(plan: ModulePlan, position: int) -> RuntimeError:
    name = names_of(plan)[position]
    if position not in plan.parameters:
        return RuntimeError(
            f"the buffer {name!r} needs a gradient, and fully_shard sums gradients of parameters only. Make it a "
            "parameter before fully_shard, or let it need no gradient, requires_grad_(False)"
        )
    return RuntimeError(
        f"{name!r} needs a gradient and is not sharded: it came into the model after fully_shard. Change the model "
        "first and apply fully_shard then; or let it need no gradient, requires_grad_(False)"
    )


def _is_below(path: str, tops: Sequence[str]) -> bool:
    return any(not top or path == top or path.startswith(f"{top}.") for top in tops)


class _CompiledParts:
    """Chooses the modules of a plan that replicas call as compiled code, so that no graph has parameters of two units.

    A unit is gathered before its code runs and freed after it, so compiled code begins and ends inside a unit. If the
    user compiles a module that has units below it, the module's own ``forward`` runs uncompiled. Instead the largest
    modules below it that lie in one unit are compiled in the same way, except those that the user has compiled already.
    ``tops`` has the position in the plan of each unit's modules, and the unit's argument ``compile``.
    """

    def __init__(self, plan: ModulePlan, tops: Mapping[int, CompileArgument | None]) -> None:
        self._entries, self._tops = plan.entries, tops
        # Without children that only refer back to a parent.
        self._below = [
            [child for key, child in entry.children.items() if child >= 0 and key not in entry.proxied]
            for entry in plan.entries
        ]

    def choose(self) -> None:
        for at in sorted(self._tops, reverse=True):  # parents come after their children
            argument = self._tops[at]
            if argument is not None:
                self._compile(at, argument.of)
        for at, entry in enumerate(self._entries):
            how = entry.compiled
            if how is None:
                continue
            called = at if how.child is None else entry.children[how.child]
            if self._holds_units(called) or (called != at and called in self._tops):
                entry.compiled = None if called == at else how._replace(functions=None)  # its own code runs uncompiled
                call = entry.attributes.pop(CALL) if called == at else entry.module
                self._compile(called, partial(compiled_in_place, call=call))

    def _compile(self, at: int, compile: Callable[..., Compiled | None]) -> None:
        entry = self._entries[at]
        if entry.compiled is not None:  # by the user
            return
        if self._holds_units(at) or not has_forward(entry.module):
            for child in self._below[at]:
                self._compile(child, compile)
        else:
            entry.compiled = compile(entry.module, others=[each.compiled for each in self._entries])

    def _holds_units(self, at: int) -> bool:
        return any(below in self._tops or self._holds_units(below) for below in self._below[at])
