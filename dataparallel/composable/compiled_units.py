"""Which modules of a tree with units run compiled code: each unit by itself, and never two units in one graph.

A unit is gathered before its code runs and freed after it, so compiled code begins and ends inside a unit. Where a user
compiles a module that has units below, the module's own ``forward`` runs as it is. Instead the largest parts below
that lie in one unit are compiled, in the same way: units without others below, and modules that hold no unit.
``composable.unit_tensors`` calls this for a new plan. It knows no values and no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from dataparallel.compiled.argument import CompileArgument
from dataparallel.compiled.calls import NOT_COMPILED
from dataparallel.compiled.recognise import CALL, Compiled, compiled_in_place
from dataparallel.modules.plan import ModuleEntry, ModulePlan

__all__ = ["compile_by_unit"]

Compile = Callable[..., Compiled | None]


def compile_by_unit(plan: ModulePlan, tops: Mapping[int, CompileArgument | None]) -> None:
    """Has replicas of the plan call compiled code so that no graph has parameters of two units.

    A module that is compiled by itself stays compiled in its own way.

    Args:
        plan: says which modules are compiled, and is changed.
        tops: positions of the units' modules, with the argument ``compile`` of their units.
    """
    if plan.has_compiled or any(argument is not None for argument in tops.values()):
        _Division(plan, tops).divide()


class _Division:
    def __init__(self, plan: ModulePlan, tops: Mapping[int, CompileArgument | None]) -> None:
        self._entries, self._tops = plan.entries, tops
        self._below = [self._children(at) for at in range(len(plan.entries))]

    def divide(self) -> None:
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
            entry.compiled = entry.compiled._replace(functions=NOT_COMPILED)

    def _give(self, at: int, compile: Compile) -> None:
        """Compiles this module, or else what is below."""
        entry = self._entries[at]
        if entry.compiled is not None:  # in a way of its own
            return
        if self._holds_units(at) or not _has_forward(entry.module):
            for child in self._below[at]:
                self._give(child, compile)
        else:
            entry.compiled = compile(entry.module, others=[e.compiled.functions for e in self._entries if e.compiled])

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


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
