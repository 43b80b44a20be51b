"""One pass of backward over several machines: what its slots have added up is added up over machines, and averaged.

A pass is one round of all machines. Each unit takes part once, as soon as this machine's slots have added up its
gradients and all units before it have been sent. The order is that in which rank 0's units came in an earlier pass.
Nothing is added to ``.grad`` before all has succeeded: a pass that fails on one machine fails on all, without a change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.machines.collectives import Staged, Transfer, all_reduce, reduce_scatter, stage
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import PendingResult, Round
from dataparallel.sharded.units.gradients import PartialSums, UnitGradients
from dataparallel.sharded.units.over_machines import MachinesOfTree
from dataparallel.sharded.units.sums import Summed, added_in

if TYPE_CHECKING:
    from dataparallel.sharded.units.tree import Tree
    from dataparallel.sharded.units.unit import Unit


@dataclass
class _UnitInPass:
    """What one unit has in the pass.

    Attributes:
        staged: for each dtype and owner what is sent.
        rest: the same of what came after the first time. A unit may be added up several times in one pass.
        present: positions of the parameters that have a gradient on this machine.
        results: of ``staged``: what has been launched for it, or itself if there is nobody to add it up with.
    """

    number: int
    unit: Unit
    staged: list[list[Any]]
    rest: list[list[Tensor]]
    present: set[int] = field(default_factory=set)
    has_come: bool = False
    is_sent: bool = False
    results: list[list[Any]] = field(default_factory=list)

    @property
    def gradients(self) -> UnitGradients:
        return self.unit.gradients

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
    """The sums of one pass over machines. Any thread may use it. ``computing``: the stream of each accelerator."""

    def __init__(self, tree: Tree, machines: MachinesOfTree, computing: Mapping[torch.device, torch.Stream]) -> None:
        self._tree, self._machines, self._devices, self._computing = tree, machines, tree.slots, computing
        self._lock = threading.Lock()
        units = [(i, tree.units[i]) for i in tree.order_of_sums]
        self._entries = [
            _UnitInPass(i, unit, _nothing(unit), _nothing(unit))
            for i, unit in units
            if unit.requires_gradient_sync and unit.gradients.groups
        ]
        self._entry_of = {entry.unit: entry for entry in self._entries}
        self._came: list[int] = []
        self._is_ended = not self._entries
        # Without a shard group nobody takes part in sums that wait for those over the replicate group.
        has_others = machines.shard is not None or any(entry.is_for_all for entry in self._entries)
        self._learns_order = has_others and not tree.is_order_known
        self._round: Round | None = None
        self._said: PendingResult | None = None  # the order that each rank proposes
        self._end: PendingResult | None = None
        self._used: list[bool] = []
        self._scattered: _UnitInPass | None = None  # the unit whose parts go over the replicate group next
        if self._entries and has_others:
            text = [entry.describe() for entry in self._entries]
            text.insert(0, f"learns the order of units: {self._learns_order}")
            self._round = machines.all.queue.begin_round("backward", "\n".join(text))

    # ---- what slots bring --------------------------------------------------------------------------------------------

    def take_part(self, unit: Unit, at: int, owner: int, total: Tensor) -> None:
        """An owner has added up its part for dtype number ``at``, on the current streams. `end_unit` follows.

        ``total``: for each machine of the shard group its part, one after the other. It is not the caller's any more.
        """
        entry = self._entry_of[unit]
        if entry.has_come:
            rest = entry.rest[at]
            if owner < len(rest):
                rest[owner].add_(total)
            else:
                rest.append(total)
            return
        self._add_partial(entry, at, owner, total)
        entry.staged[at].append(self._staged(entry, total.to(entry.wire(at))))

    def end_unit(self, unit: Unit, present: Collection[int]) -> None:
        """All owners have brought their parts of a unit. Those units are sent that come next in the order."""
        entry = self._entry_of[unit]
        entry.present.update(present)
        if entry.has_come:
            return
        entry.has_come = True
        with self._lock:
            self._came.append(entry.number)
            for each in self._entries:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, entry: _UnitInPass, at: int, owner: int, total: Tensor) -> None:
        waiting = entry.gradients.partial
        if waiting is not None:
            total.view(self._machines.parts, -1)[self._machines.part].add_(waiting.totals[at][owner])

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def _staged(self, entry: _UnitInPass, total: Tensor) -> Any:
        """The total, staged on the current stream; or itself, if there is nobody to add it up with."""
        shard, replicate = self._machines.shard, self._machines.replicate
        if shard is not None:
            return stage(shard, total, total.numel() // shard.size, self._computing)
        return stage(replicate, total) if replicate is not None and entry.is_for_all else total

    def _send(self, entry: _UnitInPass) -> None:
        """Has a unit's parts scattered. With both groups, those of the unit before go over the replicate group then.

        So the second sum of one unit, which waits for the first, does not hold up the first one of the next.
        """
        entry.is_sent = True
        entry.results = [self._scatter(self._round, entry, staged) for staged in entry.staged]
        self._send_scattered()
        self._scattered = entry
        if self._machines.shard is None or self._machines.replicate is None:
            self._send_scattered()

    def _send_scattered(self) -> None:
        entry, self._scattered = self._scattered, None
        if entry is not None:
            entry.results = [self._add_up(self._round, entry, parts) for parts in entry.results]

    def _scatter(self, round: Round | None, entry: _UnitInPass, staged: Sequence[Any]) -> list[Any]:
        """Has the sums over the shard group made, of which each machine gets its part, for all owners together."""
        shard = self._machines.shard
        if shard is None:
            return [*staged]
        return _launched(round, entry, [partial(reduce_scatter, shard, each) for each in staged])

    def _add_up(self, round: Round | None, entry: _UnitInPass, parts: Sequence[Any]) -> list[Any]:
        """Has what `_scatter` has returned added up over the replicate group."""
        replicate = self._machines.replicate
        if replicate is None or not entry.is_for_all:
            return [*parts]
        calls = [partial(_all_reduce, replicate, each) for each in parts]
        return _launched(round, entry, calls, () if self._machines.shard is None else parts)

    # ---- the end of the pass -----------------------------------------------------------------------------------------

    def end_round(self) -> None:
        """The slots have brought everything. The rest takes part with zeros."""
        if self._is_ended:
            return
        self._send_rest()
        for entry in self._entries:
            if (waiting := entry.gradients.partial) is not None:
                entry.present.update(waiting.present)
        self._used = [i in each.present for each in self._entries for i in each.unit.recorded]
        self._used += [bool(each.rest[0]) for each in self._entries]
        if self._round is not None:
            self._end = self._round.end(self._used)

    def fail_round(self, error: BaseException) -> None:
        """The pass has failed on this machine: the others are told, after what they wait for."""
        if self._is_ended:
            return
        self._send_rest(has_failed=True)
        if self._round is not None:
            self._round.end([False] * sum(len(each.unit.recorded) + 1 for each in self._entries), error)

    def _send_rest(self, has_failed: bool = False) -> None:
        """Units that have not come take part with zeros, and with what they have of earlier passes. Then the order."""
        with self._lock, torch.no_grad(), streams_set(self._computing):
            self._is_ended = True
            for entry in self._entries:
                if not entry.is_sent:
                    if has_failed:
                        entry.staged = _nothing(entry.unit)
                    if has_failed or not entry.has_come:
                        self._fill(entry, with_partial=not has_failed)
                    self._send(entry)
            self._send_scattered()
            if self._learns_order and self._round is not None:
                order = [*dict.fromkeys([*self._came, *self._tree.order_of_sums])]
                self._said = self._round.all_gather_object("the order of units", lambda: order)

    def _fill(self, entry: _UnitInPass, with_partial: bool) -> None:
        for at, (_, layout, dtype) in enumerate(entry.gradients.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.parts * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(entry.wire(at), dtype), device=device)
                if with_partial:
                    self._add_partial(entry, at, owner, zeros)
                entry.staged[at].append(self._staged(entry, zeros.to(entry.wire(at))))

    def add_to_gradients(self, summed: Summed) -> None:
        """Waits for all sums, and adds them to ``.grad``.

        ``summed``: gets the parameters that have gradients, and the gradients that their hooks have to see first.

        Raises:
            dataparallel.machines.errors.MachinesError: a machine is gone or has failed, or they differ in what they
                add up. No gradient has been changed.
        """
        if not self._entries:
            return
        used = iter(self._used if self._end is None else self._end.wait())
        with torch.no_grad(), streams_set(self._computing):
            present = [[i for i in each.unit.recorded if next(used)] for each in self._entries]
            rests = self._sums_of_rests([each for each in self._entries if next(used)])
            sums = [[self._results(each, at, rests) for at in range(len(each.results))] for each in self._entries]
            if self._said is not None:
                self._tree.learn_order(self._said.wait()[0])
            for entry, totals in zip(self._entries, sums, strict=True):
                if (hook := entry.unit.all_reduce_hook) is not None and not self._waits(entry):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(entry, totals) for entry, totals in zip(self._entries, sums, strict=True)]
            if any(entry.unit.is_offloaded for entry in self._entries):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for entry, of_dtypes, found in zip(self._entries, parts, present, strict=True):
                self._set(entry, of_dtypes, found, summed)

    def _sums_of_rests(self, units: Sequence[_UnitInPass]) -> dict[int, list[list[Any]]]:
        """Adds up what came after the first time on any machine: for each of these units its results."""
        if not units:
            return {}
        round, text = None, "\n".join(["again", *(entry.describe() for entry in units)])
        if self._round is not None:
            round = self._machines.all.queue.begin_round("backward", text)
        found: dict[int, list[list[Any]]] = {}
        for entry in units:
            found[entry.number] = results = []
            for at, (_, layout, _) in enumerate(entry.gradients.groups):
                wire, numel = entry.wire(at), self._machines.parts * layout.numel
                rest = entry.rest[at] or [torch.zeros(numel, dtype=wire, device=device) for device in self._devices]
                staged = [self._staged(entry, total.to(wire)) for total in rest]
                results.append(self._add_up(round, entry, self._scatter(round, entry, staged)))
        if round is not None:
            round.end([]).wait()
        return found

    def _results(self, entry: _UnitInPass, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """The sums of all owners, in the dtype in which they are added."""
        dtype = added_in(entry.wire(at), entry.gradients.groups[at][2])
        found = [_arrived(result, self._devices[i]).to(dtype) for i, result in enumerate(entry.results[at])]
        for i, result in enumerate(rests[entry.number][at] if entry.number in rests else ()):
            found[i] = found[i] + _arrived(result, self._devices[i])
        return found

    def _parts(self, entry: _UnitInPass, totals: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """What goes to ``.grad``; or what waits for a pass that adds it up over the replicate group."""
        if self._waits(entry):
            return [[*of_owners] for of_owners in totals]
        parts = [
            [total.to(dtype) for total in of_owners]
            for of_owners, (_, _, dtype) in zip(totals, entry.gradients.groups, strict=True)
        ]
        unit = entry.unit
        return [[*map(unit.to_host, of_owners)] for of_owners in parts] if unit.is_offloaded else parts

    def _set(
        self, entry: _UnitInPass, parts: Sequence[Sequence[Tensor]], present: Collection[int], summed: Summed
    ) -> None:
        gradients, parameters = entry.gradients, entry.unit.parameters
        gradients.partial = None
        if self._waits(entry):
            if present:
                gradients.partial = PartialSums(gradients.groups, parameters, parts, present)
            return
        gradients.set_sums(parts, present, summed)
        summed.note(parameters[i] for i in present)

    def _waits(self, entry: _UnitInPass) -> bool:
        return self._machines.replicate is not None and not entry.is_for_all


def _nothing(unit: Unit) -> list[list[Any]]:
    return [[] for _ in unit.gradients.groups]


def _launched(
    round: Round | None,
    entry: _UnitInPass,
    calls: Sequence[Callable[[], Transfer]],
    after: Sequence[PendingResult] = (),
) -> list[Any]:
    assert round is not None
    return round.launch_together([f"the gradients of {entry.unit.name!r}"] * len(calls), calls, after)


def _all_reduce(replicate: Machines, part: PendingResult | Staged) -> Transfer:
    return all_reduce(replicate, part.received() if isinstance(part, PendingResult) else part)


def _arrived(result: Any, device: torch.device) -> Tensor:
    """The tensor that has been launched, on the device, for its current stream."""
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)
