"""One pass of backward over several machines: what its slots have added up is added up over machines.

Each unit takes part once, in an order that all machines agree on, as soon as this machine's slots have added up its
gradients and all units before it have been sent. A unit that they did not reach takes part with zeros at the end of the
pass. Then machines say which parameters have a gradient anywhere. Nothing is added to ``.grad`` before all of that has
succeeded, so a pass that fails on one machine fails on all and changes nothing.

The order is that in which rank 0's units came in an earlier pass of the tree, and at first the reverse of registration.
A unit may be added up several times in one pass (``units.gradients``). What comes after its first time is sent at the
end.

Sums over the shard group come first, then those over the replicate group.
Gradients are averaged over machines: they are divided before they are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.streams.current import Event, streams_set
from dataparallel.units.deliveries import Summed, added_in
from dataparallel.units.over_machines import MachinesOfTree
from dataparallel.units.partial_sums import PartialSums
from dataparallel.units.rounds_over_machines import RoundsOverMachines

if TYPE_CHECKING:
    from dataparallel.units.gradients import UnitGradients
    from dataparallel.units.unit import Unit

__all__ = ["SumsOverMachines"]


@dataclass
class _OfUnit:
    """What one unit has in the pass.

    Attributes:
        staged: for each dtype and owner what is sent.
        rest: the same of what came after the first time.
        present: which of the parameters that need gradients have one on this machine.
        results: of ``staged``.
    """

    number: int
    unit: Unit
    staged: list[list[Any]]
    rest: list[list[Tensor]]
    present: list[bool]
    has_come: bool = False
    is_sent: bool = False
    results: list[list[Any]] = field(default_factory=list)

    @property
    def gradients(self) -> UnitGradients:
        found: UnitGradients = self.unit.gradients
        return found

    @property
    def is_for_all(self) -> bool:
        """True if it is added up over the replicate group too."""
        return self.unit.requires_all_reduce


class SumsOverMachines:
    """The sums of one pass over machines. Any thread may use it.

    Args:
        machines: of the tree.
        units: of the tree.
        devices: the owners on this machine.
        order: numbers of units, in which they take part.
        computing: the computing stream of each accelerator.
        learn_order: called at the end with rank 0's order, or ``None`` if it is known.
    """

    def __init__(
        self,
        machines: MachinesOfTree,
        units: Sequence[Unit],
        devices: Sequence[torch.device],
        order: Sequence[int],
        computing: Mapping[torch.device, torch.Stream],
        learn_order: Callable[[list[int]], None] | None,
    ) -> None:
        self._machines, self._devices, self._computing = machines, list(devices), computing
        self._lock = threading.Lock()
        summed = [(i, units[i]) for i in order if units[i].requires_gradient_sync and units[i].gradients.groups]
        self._units = [
            _OfUnit(i, unit, _nothing(unit), _nothing(unit), [False] * len(unit.gradients.recorded))
            for i, unit in summed
        ]
        self._of = {id(of.unit): of for of in self._units}
        self._came: list[int] = []
        self._order = list(order)
        is_for_all = any(of.is_for_all for of in self._units)
        self._rounds = RoundsOverMachines(machines.shard, machines.replicate if is_for_all else None, computing)
        self._learn = learn_order if is_for_all or machines.replicate is None else None
        self._learned: Callable[[], list[int]] = list
        self._is_ended = not self._units
        self._used: Callable[[], list[bool]] = list
        if self._units:
            text = [f"learns the order of units: {self._learn is not None}", *(_described(of) for of in self._units)]
            self._rounds.begin("\n".join(text))

    # ---- what slots bring --------------------------------------------------------------------------------------------

    def take(self, unit: Unit, at: int, owner: int, total: Tensor) -> None:
        """An owner has added up its part for dtype number ``at``, on the current streams. `came` follows for the unit.

        ``total``: for each machine of the shard group its part, one after the other. It is not the caller's any more.
        """
        of = self._of[id(unit)]
        if of.has_come:
            rest = of.rest[at]
            if owner < len(rest):
                rest[owner].add_(total)
            else:
                rest.append(total)
            return
        self._add_partial(of, at, owner, total)
        of.staged[at].append(self._rounds.staged(total.to(self._wire(of, at)), of.is_for_all))

    def came(self, unit: Unit, present: Sequence[bool]) -> None:
        """All owners have brought their parts of a unit. Those units are sent that come next in the order."""
        of = self._of[id(unit)]
        of.present = [a or b for a, b in zip(of.present, present, strict=True)]
        if of.has_come:
            return
        of.has_come = True
        with self._lock:
            self._came.append(of.number)
            for each in self._units:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, of: _OfUnit, at: int, owner: int, total: Tensor) -> None:
        partial = of.gradients.partial
        if partial is not None:
            total.view(self._machines.parts, -1)[self._machines.part].add_(partial.totals[at][owner])

    def _send(self, of: _OfUnit) -> None:
        of.is_sent = True
        of.results = [self._sum(of, of_owners) for of_owners in of.staged]

    def _sum(self, of: _OfUnit, of_owners: Sequence[Any]) -> list[Any]:
        return self._rounds.sum(f"the gradients of {of.unit.name!r}", of_owners, of.is_for_all)

    def _wire(self, of: _OfUnit, at: int) -> torch.dtype:
        """The dtype in which parts travel."""
        return of.unit.dtype_of_sums(of.gradients.groups[at][2])

    # ---- the end of the pass -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """The slots have brought everything. The rest takes part with zeros."""
        if self._is_ended:
            return
        with self._lock, torch.no_grad(), streams_set(self._computing):
            for of in self._units:
                if not of.has_come:
                    self._fill(of)
                if not of.is_sent:
                    self._send(of)
            self._launch_order()
            self._is_ended = True
        for of in self._units:
            if (partial := of.gradients.partial) is not None:
                of.present = [a or i in partial.present for i, a in zip(of.gradients.recorded, of.present, strict=True)]
        used = [flag for of in self._units for flag in of.present] + [bool(of.rest[0]) for of in self._units]
        self._used = self._rounds.end(used)

    def fail(self, error: BaseException) -> None:
        """The pass has failed on this machine: the others are told, after what they wait for."""
        if self._is_ended:
            return
        with self._lock, torch.no_grad(), streams_set(self._computing):
            self._is_ended = True
            for of in self._units:
                if not of.is_sent:
                    of.staged = _nothing(of.unit)
                    self._fill(of, with_partial=False)
                    self._send(of)
            self._launch_order()
        number = sum(len(of.present) + 1 for of in self._units)
        self._rounds.fail([False] * number, error)

    def _fill(self, of: _OfUnit, with_partial: bool = True) -> None:
        """The unit takes part with zeros, and with what it has of earlier passes."""
        for at, (_, layout, dtype) in enumerate(of.gradients.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.parts * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(self._wire(of, at), dtype), device=device)
                if with_partial:
                    self._add_partial(of, at, owner, zeros)
                of.staged[at].append(self._rounds.staged(zeros.to(self._wire(of, at)), of.is_for_all))

    def _launch_order(self) -> None:
        """Rank 0's order of units goes to all."""
        if self._learn is not None:
            first = dict.fromkeys([*self._came, *self._order])
            self._learned = self._rounds.send_numbers([*first])

    def finish(self, summed: Summed) -> None:
        """Waits for all sums, and adds them to ``.grad``.

        ``summed``: gets the parameters that have gradients, and the gradients that their hooks have to see first.

        Raises:
            dataparallel.machines.errors.MachinesError: a machine is gone or has failed, or they differ in what they
                add up. No gradient has been changed.
        """
        if not self._units:
            return
        used = iter(self._used())
        with torch.no_grad(), streams_set(self._computing):
            present = [[next(used) for _ in of.present] for of in self._units]
            rests = self._sums_of_rests([of for of in self._units if next(used)])
            sums = [[self._results(of, at, rests) for at in range(len(of.results))] for of in self._units]
            if self._learn is not None and (order := self._learned()):
                self._learn(order)
            for of, totals in zip(self._units, sums, strict=True):
                if (hook := of.unit.all_reduce_hook) is not None and not self._waits(of):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(of, totals) for of, totals in zip(self._units, sums, strict=True)]
            if any(of.unit.is_offloaded for of in self._units):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for each, totals, found in zip(self._units, parts, present, strict=True):
                self._set(each, totals, found, summed)

    def _sums_of_rests(self, units: Sequence[_OfUnit]) -> dict[int, list[list[Any]]]:
        """Adds up what came after the first time on any machine: for each of these units its results."""
        if not units:
            return {}
        self._rounds.begin("\n".join(["again", *map(_described, units)]))
        found: dict[int, list[list[Any]]] = {}
        for of in units:
            found[of.number] = of_unit = []
            for at, (_, layout, _) in enumerate(of.gradients.groups):
                wire, numel = self._wire(of, at), self._machines.parts * layout.numel
                rest = of.rest[at] or [torch.zeros(numel, dtype=wire, device=d) for d in self._devices]
                staged = [self._rounds.staged(total.to(wire), of.is_for_all) for total in rest]
                of_unit.append(self._sum(of, staged))
        self._rounds.end([])()
        return found

    def _results(self, of: _OfUnit, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """The sums of all owners, in the dtype in which they are added."""
        dtype = added_in(self._wire(of, at), of.gradients.groups[at][2])
        found = [_arrived(result, self._devices[i]).to(dtype) for i, result in enumerate(of.results[at])]
        for i, result in enumerate(rests[of.number][at] if of.number in rests else ()):
            found[i] = found[i] + _arrived(result, self._devices[i])
        return found

    def _parts(self, of: _OfUnit, totals: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """What goes to ``.grad``; or what waits for a pass that adds it up over the replicate group."""
        if self._waits(of):
            return [[*of_owners] for of_owners in totals]
        parts = [
            [total.to(dtype) for total in of_owners]
            for of_owners, (_, _, dtype) in zip(totals, of.gradients.groups, strict=True)
        ]
        return [[*map(of.unit.to_host, of_owners)] for of_owners in parts] if of.unit.is_offloaded else parts

    def _set(self, of: _OfUnit, parts: Sequence[Sequence[Tensor]], present: Sequence[bool], summed: Summed) -> None:
        gradients, parameters = of.gradients, of.unit.parameters
        gradients.partial = None
        positions = [i for i, found in zip(gradients.recorded, present, strict=True) if found]
        if self._waits(of):
            if positions:
                gradients.partial = PartialSums(gradients.groups, parameters, parts, positions)
            return
        gradients.set_sums(parts, present, summed)
        summed.note(parameters[i] for i in positions)

    def _waits(self, of: _OfUnit) -> bool:
        return self._machines.replicate is not None and not of.is_for_all


def _nothing(unit: Unit) -> list[list[Any]]:
    return [[] for _ in unit.gradients.groups]


def _described(of: _OfUnit) -> str:
    """What has to be equal on all machines."""
    sizes = ", ".join(f"{layout.numel} {of.unit.dtype_of_sums(dtype)}" for _, layout, dtype in of.gradients.groups)
    return f"unit {of.unit.name!r} ({sizes}{'' if of.is_for_all else ', no all-reduce'})"


def _arrived(result: Any, device: torch.device) -> Tensor:
    """The tensor that has been launched, on the device, for its current stream."""
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)
