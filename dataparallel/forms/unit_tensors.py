"""The tensors of the replicas of a tree with units, where the units find their modules in it, and what is compiled.

Parameters of units are the units' own tensors on each slot (``units.slot_unit``), which are empty now. Buffers are sent
to the slots at each call; those of the first slot are the module's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.forms.managed import has_forward
from dataparallel.replicas.compiled.calls import CALL, CompileArgument, Compiled, compiled_in_place
from dataparallel.replicas.kept_tensors import ReplicaTensors
from dataparallel.replicas.plan import UNIT_MODULE, ModuleEntry, ModulePlan, dotted
from dataparallel.replicas.references import Rebinding, reached
from dataparallel.replicas.replicate import put
from dataparallel.sharded.units.calls import ModuleRunner, RootCall, UnitModule
from dataparallel.sharded.units.unit import Unit


class UnitTensors(ReplicaTensors):
    """The tensors of one tree. ``tops`` and ``compile`` are for each of its units, with weak references to modules."""

    def __init__(
        self,
        units: Sequence[Unit],
        tops: Sequence[Sequence[nn.Module]],
        compile: Sequence[CompileArgument | None],
    ) -> None:
        self._units, self._compile = list(units), list(compile)
        self._modules = [[weakref.ref(module) for module in modules] for modules in tops]
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
        """See `ReplicaTensors.for_call`. Only buffers are sent.

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
            if id(tensor) in of_unit:
                unit, position = of_unit[id(tensor)]
                for slot, tensors in enumerate(by_slot):
                    tensors[i] = unit.slot_units[slot].parameters[position]
            elif record and tensor.requires_grad:
                raise _not_sharded(plan, i)
            else:
                sent.append(i)
        copies = comm.broadcast_coalesced([plan.tensors[i] for i in sent], slots, cap_bytes, own_storage=True)
        put(by_slot, sent, copies)
        return by_slot

    def bind(self, replicas: Sequence[nn.Module], call: RootCall) -> None:
        """Lets the modules of units in new replicas gather their parameters, and registers the sharded ones there."""
        for slot, replica in enumerate(replicas):
            root: UnitModule = vars(replica)[UNIT_MODULE]
            for each in (root, *root.lower_unit_modules):
                unit = self._units[each.unit_number]
                each.runner = ModuleRunner(unit.slot_units[slot], each.number, each.entries, call)
                each.runner.register(unit.parameters)
            modules = dict(replica.named_modules()) if self._from_outside else {}
            for path, key, units in self._from_outside:
                attributes = modules[path].__dict__
                sharded = {
                    id(full): parameter
                    for unit in units
                    for full, parameter in zip(unit.slot_units[slot].parameters, unit.parameters, strict=True)
                }
                attributes[key] = Rebinding(sharded).rebound(attributes[key])

    def _find_paths(self, plan: ModulePlan) -> None:
        """Finds the units' modules, and the places of their parameters. Those that were replaced are not there."""
        paths = {id(entry.module): entry.name for entry in plan.entries} | {plan.source_id: ""}
        registries = {id(entry.module._parameters): entry.name for entry in plan.entries}
        found = [[id(module()) for module in modules] for modules in self._modules]
        self._tops = [[paths[module] for module in modules if module in paths] for modules in found]
        self._places = [
            [(registries[id(own)], name, i) for own, name, i in unit.registries.entries if id(own) in registries]
            for unit in self._units
        ]

    def _mark(self, plan: ModulePlan) -> None:
        """Has replicas of the plan made with the objects that run calls of the units' modules."""
        if UNIT_MODULE in plan.entries[0].attributes:
            return
        numbers = {entry.name: at for at, entry in enumerate(plan.entries)}
        for at, (tops, of_unit) in enumerate(zip(self._tops, self._places, strict=True)):
            places = [(numbers[path], name, i) for path, name, i in of_unit]
            for number, path in enumerate(tops):
                plan.entries[numbers[path]].attributes[UNIT_MODULE] = UnitModule(at, number, places)
        arguments = {
            numbers[path]: argument for argument, tops in zip(self._compile, self._tops, strict=True) for path in tops
        }
        if plan.has_compiled or any(argument is not None for argument in arguments.values()):
            _Division(plan, arguments).divide()

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


# ---- compiled code of units ------------------------------------------------------------------------------------------


class _Division:
    """Changes a plan so that replicas call compiled code of which no graph has parameters of two units.

    A unit is gathered before its code runs and freed after it, so compiled code begins and ends inside a unit. Where a
    user compiles a module that has units below, the module's own ``forward`` runs as it is. Instead the largest parts
    below that lie in one unit are compiled, in the same way: units without others below, and modules that hold no unit.
    A module that is compiled by itself stays compiled in its own way. ``tops`` are positions of the units' modules.
    """

    def __init__(self, plan: ModulePlan, tops: Mapping[int, CompileArgument | None]) -> None:
        self._entries, self._tops = plan.entries, tops
        self._below = [self._children(at) for at in range(len(plan.entries))]

    def divide(self) -> None:
        """Changes the plan's entries."""
        for at in sorted(self._tops, reverse=True):  # parents come after their children
            argument = self._tops[at]
            if argument is not None:
                self._give(at, argument.of)
        for at, entry in enumerate(self._entries):
            if entry.compiled is None:
                continue
            called = at if entry.compiled.child is None else entry.children[entry.compiled.child]
            if self._holds_units(called) or (called != at and called in self._tops):
                compile = partial(compiled_in_place, call=entry.attributes[CALL] if called == at else entry.module)
                self._run_as_it_is(entry)
                self._give(called, compile)

    def _run_as_it_is(self, entry: ModuleEntry) -> None:
        """The module's own code is not compiled."""
        assert entry.compiled is not None
        if entry.compiled.child is None:
            entry.compiled = None
            del entry.attributes[CALL]
        else:
            entry.compiled = entry.compiled._replace(functions=None)

    def _give(self, at: int, compile: Callable[..., Compiled | None]) -> None:
        """Compiles this module, or else what is below."""
        entry = self._entries[at]
        if entry.compiled is not None:  # in a way of its own
            return
        if self._holds_units(at) or not has_forward(entry.module):
            for child in self._below[at]:
                self._give(child, compile)
        else:
            entry.compiled = compile(entry.module, others=[each.compiled for each in self._entries])

    def _holds_units(self, at: int) -> bool:
        """True if there is a module of a unit below this one."""
        seen: set[int] = set()
        waiting = [*self._below[at]]
        while waiting:
            below = waiting.pop()
            if below in self._tops:
                return True
            if below not in seen:
                seen.add(below)
                waiting += self._below[below]
        return False

    def _children(self, at: int) -> list[int]:
        """Positions of the children that are in the plan, without those that only lead back to a parent."""
        entry = self._entries[at]
        return [child for key, child in entry.children.items() if child >= 0 and key not in entry.proxied]
