"""One pass of backward over several machines: what its slots have added up is added up over machines, and averaged.

A pass is one round of all machines. Each unit takes part once, as soon as this machine's slots have added up its
gradients and all units before it have been sent. The order is that in which rank 0's units came in an earlier pass.
Nothing is added to ``.grad`` before all has succeeded: a pass that fails on one machine fails on all, without a change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.machines.collectives import Staged, Transfer, all_reduce, reduce_scatter, stage
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import Launched, Round
from dataparallel.sharded.units.deliveries import Summed, added_in
from dataparallel.sharded.units.over_machines import MachinesOfTree
from dataparallel.sharded.units.partial_sums import PartialSums

if TYPE_CHECKING:
    from dataparallel.sharded.units.gradients import UnitGradients
    from dataparallel.sharded.units.unit import Unit


@dataclass
class _OfUnit:
    """What one unit has in the pass.

    Attributes:
        staged: for each dtype and owner what is sent.
        rest: the same of what came after the first time. A unit may be added up several times in one pass.
        present: which of the parameters that need gradients have one on this machine.
        results: of ``staged``: what has been launched for it, or itself if there is nobody to add it up with.
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

    def wire(self, at: int) -> torch.dtype:
        """The dtype in which parts travel."""
        return self.unit.dtype_of_sums(self.gradients.groups[at][2])

    def describe(self) -> str:
        """What has to be equal on all machines."""
        sizes = ", ".join(f"{layout.numel} {self.wire(at)}" for at, (_, layout, _) in enumerate(self.gradients.groups))
        return f"unit {self.unit.name!r} ({sizes}{'' if self.is_for_all else ', no all-reduce'})"


class SumsOverMachines:
    """The sums of one pass over machines. Any thread may use it.

    Args:
        machines, units: of the tree.
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
        self._of = {id(of_unit.unit): of_unit for of_unit in self._units}
        self._came: list[int] = []
        self._order = list(order)
        self._is_ended = not self._units
        # Without a shard group nobody takes part in sums that wait for those over the replicate group.
        has_others = machines.shard is not None or any(of_unit.is_for_all for of_unit in self._units)
        self._learn = learn_order if has_others else None
        self._round: Round | None = None
        self._said: Launched | None = None  # the order that each rank proposes
        self._end: Launched | None = None
        self._used: list[bool] = []
        self._scattered: _OfUnit | None = None  # the unit whose parts go over the replicate group next
        if self._units and has_others:
            text = [f"learns the order of units: {self._learn is not None}", *(each.describe() for each in self._units)]
            self._round = machines.all.queue.begin_round("backward", "\n".join(text))

    # ---- what slots bring --------------------------------------------------------------------------------------------

    def take(self, unit: Unit, at: int, owner: int, total: Tensor) -> None:
        """An owner has added up its part for dtype number ``at``, on the current streams. `came` follows for the unit.

        ``total``: for each machine of the shard group its part, one after the other. It is not the caller's any more.
        """
        of_unit = self._of[id(unit)]
        if of_unit.has_come:
            rest = of_unit.rest[at]
            if owner < len(rest):
                rest[owner].add_(total)
            else:
                rest.append(total)
            return
        self._add_partial(of_unit, at, owner, total)
        of_unit.staged[at].append(self._staged(of_unit, total.to(of_unit.wire(at))))

    def came(self, unit: Unit, present: Sequence[bool]) -> None:
        """All owners have brought their parts of a unit. Those units are sent that come next in the order."""
        of_unit = self._of[id(unit)]
        of_unit.present = [a or b for a, b in zip(of_unit.present, present, strict=True)]
        if of_unit.has_come:
            return
        of_unit.has_come = True
        with self._lock:
            self._came.append(of_unit.number)
            for each in self._units:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, of_unit: _OfUnit, at: int, owner: int, total: Tensor) -> None:
        waiting = of_unit.gradients.partial
        if waiting is not None:
            total.view(self._machines.parts, -1)[self._machines.part].add_(waiting.totals[at][owner])

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def _staged(self, of_unit: _OfUnit, total: Tensor) -> Any:
        """The total, staged on the current stream; or itself, if there is nobody to add it up with."""
        shard, replicate = self._machines.shard, self._machines.replicate
        if shard is not None:
            return stage(shard, total, total.numel() // shard.size, self._computing)
        return stage(replicate, total) if replicate is not None and of_unit.is_for_all else total

    def _send(self, of_unit: _OfUnit) -> None:
        """Has a unit's parts scattered. With both groups, those of the unit before go over the replicate group then.

        So the second sum of one unit, which waits for the first, does not hold up the first one of the next.
        """
        of_unit.is_sent = True
        of_unit.results = [self._scatter(self._round, of_unit, staged) for staged in of_unit.staged]
        self._send_scattered()
        self._scattered = of_unit
        if self._machines.shard is None or self._machines.replicate is None:
            self._send_scattered()

    def _send_scattered(self) -> None:
        of_unit, self._scattered = self._scattered, None
        if of_unit is not None:
            of_unit.results = [self._add_up(self._round, of_unit, parts) for parts in of_unit.results]

    def _scatter(self, round: Round | None, of_unit: _OfUnit, staged: Sequence[Any]) -> list[Any]:
        """Has the sums over the shard group made, of which each machine gets its part, for all owners together."""
        shard = self._machines.shard
        if shard is None:
            return [*staged]
        return _launched(round, of_unit, [partial(reduce_scatter, shard, each) for each in staged])

    def _add_up(self, round: Round | None, of_unit: _OfUnit, parts: Sequence[Any]) -> list[Any]:
        """Has what `_scatter` has returned added up over the replicate group."""
        replicate = self._machines.replicate
        if replicate is None or not of_unit.is_for_all:
            return [*parts]
        calls = [partial(_all_reduce, replicate, each) for each in parts]
        return _launched(round, of_unit, calls, () if self._machines.shard is None else parts)

    # ---- the end of the pass -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """The slots have brought everything. The rest takes part with zeros."""
        if self._is_ended:
            return
        self._send_rest()
        for of_unit in self._units:
            if (waiting := of_unit.gradients.partial) is not None:
                recorded = zip(of_unit.gradients.recorded, of_unit.present, strict=True)
                of_unit.present = [is_present or i in waiting.present for i, is_present in recorded]
        self._used = [flag for each in self._units for flag in each.present]
        self._used += [bool(each.rest[0]) for each in self._units]
        if self._round is not None:
            self._end = self._round.end(self._used)

    def fail(self, error: BaseException) -> None:
        """The pass has failed on this machine: the others are told, after what they wait for."""
        if self._is_ended:
            return
        self._send_rest(has_failed=True)
        if self._round is not None:
            self._round.end([False] * sum(len(each.present) + 1 for each in self._units), error)

    def _send_rest(self, has_failed: bool = False) -> None:
        """Units that have not come take part with zeros, and with what they have of earlier passes. Then the order."""
        with self._lock, torch.no_grad(), streams_set(self._computing):
            self._is_ended = True
            for of_unit in self._units:
                if not of_unit.is_sent:
                    if has_failed:
                        of_unit.staged = _nothing(of_unit.unit)
                    if has_failed or not of_unit.has_come:
                        self._fill(of_unit, with_partial=not has_failed)
                    self._send(of_unit)
            self._send_scattered()
            if self._learn is not None and self._round is not None:
                order = [*dict.fromkeys([*self._came, *self._order])]
                self._said = self._round.say("the order of units", lambda: order)

    def _fill(self, of_unit: _OfUnit, with_partial: bool) -> None:
        for at, (_, layout, dtype) in enumerate(of_unit.gradients.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.parts * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(of_unit.wire(at), dtype), device=device)
                if with_partial:
                    self._add_partial(of_unit, at, owner, zeros)
                of_unit.staged[at].append(self._staged(of_unit, zeros.to(of_unit.wire(at))))

    def finish(self, summed: Summed) -> None:
        """Waits for all sums, and adds them to ``.grad``.

        ``summed``: gets the parameters that have gradients, and the gradients that their hooks have to see first.

        Raises:
            dataparallel.machines.errors.MachinesError: a machine is gone or has failed, or they differ in what they
                add up. No gradient has been changed.
        """
        if not self._units:
            return
        used = iter(self._used if self._end is None else self._end.wait())
        with torch.no_grad(), streams_set(self._computing):
            present = [[next(used) for _ in each.present] for each in self._units]
            rests = self._sums_of_rests([each for each in self._units if next(used)])
            sums = [[self._results(each, at, rests) for at in range(len(each.results))] for each in self._units]
            if self._learn is not None and self._said is not None:
                self._learn(self._said.wait()[0])
            for of_unit, totals in zip(self._units, sums, strict=True):
                if (hook := of_unit.unit.all_reduce_hook) is not None and not self._waits(of_unit):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(of_unit, totals) for of_unit, totals in zip(self._units, sums, strict=True)]
            if any(of_unit.unit.is_offloaded for of_unit in self._units):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for of_unit, of_dtypes, found in zip(self._units, parts, present, strict=True):
                self._set(of_unit, of_dtypes, found, summed)

    def _sums_of_rests(self, units: Sequence[_OfUnit]) -> dict[int, list[list[Any]]]:
        """Adds up what came after the first time on any machine: for each of these units its results."""
        if not units:
            return {}
        round, text = None, "\n".join(["again", *(of_unit.describe() for of_unit in units)])
        if self._round is not None:
            round = self._machines.all.queue.begin_round("backward", text)
        found: dict[int, list[list[Any]]] = {}
        for of_unit in units:
            found[of_unit.number] = results = []
            for at, (_, layout, _) in enumerate(of_unit.gradients.groups):
                wire, numel = of_unit.wire(at), self._machines.parts * layout.numel
                rest = of_unit.rest[at] or [torch.zeros(numel, dtype=wire, device=device) for device in self._devices]
                staged = [self._staged(of_unit, total.to(wire)) for total in rest]
                results.append(self._add_up(round, of_unit, self._scatter(round, of_unit, staged)))
        if round is not None:
            round.end([]).wait()
        return found

    def _results(self, of_unit: _OfUnit, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """The sums of all owners, in the dtype in which they are added."""
        dtype = added_in(of_unit.wire(at), of_unit.gradients.groups[at][2])
        found = [_arrived(result, self._devices[i]).to(dtype) for i, result in enumerate(of_unit.results[at])]
        for i, result in enumerate(rests[of_unit.number][at] if of_unit.number in rests else ()):
            found[i] = found[i] + _arrived(result, self._devices[i])
        return found

    def _parts(self, of_unit: _OfUnit, totals: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """What goes to ``.grad``; or what waits for a pass that adds it up over the replicate group."""
        if self._waits(of_unit):
            return [[*of_owners] for of_owners in totals]
        parts = [
            [total.to(dtype) for total in of_owners]
            for of_owners, (_, _, dtype) in zip(totals, of_unit.gradients.groups, strict=True)
        ]
        unit = of_unit.unit
        return [[*map(unit.to_host, of_owners)] for of_owners in parts] if unit.is_offloaded else parts

    def _set(
        self, of_unit: _OfUnit, parts: Sequence[Sequence[Tensor]], present: Sequence[bool], summed: Summed
    ) -> None:
        gradients, parameters = of_unit.gradients, of_unit.unit.parameters
        gradients.partial = None
        positions = [i for i, found in zip(gradients.recorded, present, strict=True) if found]
        if self._waits(of_unit):
            if positions:
                gradients.partial = PartialSums(gradients.groups, parameters, parts, positions)
            return
        gradients.set_sums(parts, present, summed)
        summed.note(parameters[i] for i in positions)

    def _waits(self, of_unit: _OfUnit) -> bool:
        return self._machines.replicate is not None and not of_unit.is_for_all


def _nothing(unit: Unit) -> list[list[Any]]:
    return [[] for _ in unit.gradients.groups]


def _launched(
    round: Round | None, of_unit: _OfUnit, calls: Sequence[Callable[[], Transfer]], after: Sequence[Launched] = ()
) -> list[Any]:
    assert round is not None
    return round.launch_together([f"the gradients of {of_unit.unit.name!r}"] * len(calls), calls, after)


def _all_reduce(replicate: Machines, part: Launched | Staged) -> Transfer:
    return all_reduce(replicate, part.received() if isinstance(part, Launched) else part)


def _arrived(result: Any, device: torch.device) -> Tensor:
    """The tensor that has been launched, on the device, for its current stream."""
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)
