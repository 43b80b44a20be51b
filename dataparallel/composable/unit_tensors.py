"""The tensors of the replicas of a tree with units, and where the units find their modules in it.

Parameters of units are the units' own tensors on each slot (``units.on_slot``), which are empty now. Buffers are sent
to the slots at each call; those of the first slot are the module's. Only ``composable.fully_shard_state`` uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.compiled.argument import CompileArgument
from dataparallel.composable.compiled_units import compile_by_unit
from dataparallel.modules.plan import UNIT_ON_SLOT, ModulePlan, dotted
from dataparallel.modules.references import Rebinding, reached
from dataparallel.streams.arrivals import Arrivals
from dataparallel.units.calls import ForwardCall, ModuleOnSlot, UnitInReplica
from dataparallel.units.unit import Unit

__all__ = ["UnitTensors"]


class UnitTensors:
    """The tensors of one tree, for `KeptReplicas`.

    Args:
        units: of the tree.
        tops: for each unit its modules, which are referred to weakly.
        compile: for each unit how its modules are compiled, if they are not compiled themselves.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        tops: Sequence[Sequence[nn.Module]],
        compile: Sequence[CompileArgument | None],
    ) -> None:
        self._compile = list(compile)
        self._units, self._modules = list(units), [[weakref.ref(module) for module in modules] for modules in tops]
        # Paths in the tree, as it was at the last call.
        self._tops: list[list[str]] = []
        self._places: list[list[tuple[str, str, int]]] = []
        self._from_outside: list[tuple[str, str, list[Unit]]] = []

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """The plan's tensors for each of the slots.

        Raises:
            RuntimeError: a graph is recorded, and a parameter that needs a gradient is in no unit.
        """
        self._find_paths(plan)
        self._from_outside = self._references_from_outside(plan) if plan.has_references else []
        self._mark(plan)
        by_slot: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
        of_unit = {id(p): (unit, i) for unit in self._units for i, p in enumerate(unit.parameters)}
        sent: list[int] = []
        for i, tensor in enumerate(plan.tensors):
            found = of_unit.get(id(tensor))
            if found is None:
                if record and tensor.requires_grad:
                    raise _not_sharded(plan, i)
                sent.append(i)
                continue
            unit, position = found
            for slot, tensors in enumerate(by_slot):
                tensors[i] = unit.on_slots[slot].parameters[position]
        copies = comm.broadcast_coalesced([plan.tensors[i] for i in sent], slots, cap_bytes, own_storage=True)
        for tensors, of_slot in zip(by_slot, copies, strict=True):
            for i, tensor in zip(sent, of_slot, strict=True):
                tensors[i] = tensor
        return by_slot

    def bind(self, replicas: Sequence[nn.Module], call: ForwardCall) -> None:
        """Lets the modules of units in new replicas gather their parameters, and registers the sharded ones there."""
        for slot, replica in enumerate(replicas):
            root: UnitInReplica = vars(replica)[UNIT_ON_SLOT]
            for found in (root, *root.others):
                unit = self._units[found.unit]
                found.now = ModuleOnSlot(unit.on_slots[slot], found.number, found.places, call)
                found.now.register(unit.parameters)
            modules = dict(replica.named_modules()) if self._from_outside else {}
            for path, key, units in self._from_outside:
                attributes = modules[path].__dict__
                attributes[key] = Rebinding(_sharded_for_full(units, slot)).rebound(attributes[key])

    def _find_paths(self, plan: ModulePlan) -> None:
        """Finds the units' modules, and the places of their parameters. Those that were replaced are not there."""
        paths = {id(entry.module): entry.name for entry in plan.entries} | {plan.source_id: ""}
        registries = {id(entry.module._parameters): entry.name for entry in plan.entries}
        found = [[module() for module in modules] for modules in self._modules]
        self._tops = [[paths[id(module)] for module in modules if id(module) in paths] for modules in found]
        self._places = [
            [
                (registries[id(registry)], name, i)
                for registry, name, i in unit.registered.places
                if id(registry) in registries
            ]
            for unit in self._units
        ]

    def _mark(self, plan: ModulePlan) -> None:
        """Has replicas of the plan made with the objects that run calls of the units' modules."""
        if UNIT_ON_SLOT in plan.entries[0].attributes:
            return
        numbers = {entry.name: at for at, entry in enumerate(plan.entries)}
        for at, (tops, of_unit) in enumerate(zip(self._tops, self._places, strict=True)):
            places = [(numbers[path], name, i) for path, name, i in of_unit]
            for number, path in enumerate(tops):
                plan.entries[numbers[path]].attributes[UNIT_ON_SLOT] = UnitInReplica(at, number, places)
        arguments = {
            numbers[path]: argument for argument, tops in zip(self._compile, self._tops, strict=True) for path in tops
        }
        compile_by_unit(plan, arguments)

    def _references_from_outside(self, plan: ModulePlan) -> list[tuple[str, str, list[Unit]]]:
        """Attributes that lead to parameters of a unit, of modules outside of it: path, name, units.

        They may be read while the unit has no memory, which would crash the process. In replicas they lead to the
        sharded parameters, whose operators raise.
        """
        owner = {id(p): at for at, unit in enumerate(self._units) for p in unit.parameters}
        found = []
        for entry in plan.entries:
            for key in entry.references:
                units = {owner[id(item)] for item in reached(entry.attributes[key]) if id(item) in owner}
                outside = [self._units[at] for at in sorted(units) if not _is_below(entry.name, self._tops[at])]
                if outside:
                    found.append((entry.name, key, outside))
        return found

    def end_call(self) -> None:
        """Does nothing: the units free their parameters, and the next call sends buffers again."""

    forget_last_call = clear = end_call


def _not_sharded(plan: ModulePlan, position: int) -> RuntimeError:
    """The error for a parameter that came later, whose gradients nobody would sum."""
    name = next(
        dotted(entry.name, key) for entry in plan.entries for key, at in entry.parameters.items() if at == position
    )
    return RuntimeError(
        f"{name!r} needs a gradient and is not sharded: it came into the model after fully_shard. Change the model "
        "first and apply fully_shard then; or let it need no gradient, requires_grad_(False)"
    )


def _is_below(path: str, tops: Sequence[str]) -> bool:
    return any(not top or path == top or path.startswith(f"{top}.") for top in tops)


def _sharded_for_full(units: Sequence[Unit], slot: int) -> dict[int, Tensor]:
    return {
        id(full): parameter
        for unit in units
        for full, parameter in zip(unit.on_slots[slot].parameters, unit.parameters, strict=True)
    }
