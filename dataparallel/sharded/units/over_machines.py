"""`SumsOverMachines` sums the gradients of units over processes, behind the sums over the slots of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.machines.arguments import MachineMesh
from dataparallel.machines.collectives import stage
from dataparallel.machines.group import Result
from dataparallel.sharded.units.buffers import added_in
from dataparallel.sharded.units.sharded_unit import ShardedUnit, WaitingSums

_BACKWARD = "backward"

_Add: TypeAlias = Callable[[ShardedUnit, Sequence[Sequence[Tensor]], Collection[int]], None]
"""Takes a unit's totals: for each dtype the parts of all owners, and the positions with gradients."""


@dataclass
class _UnitEntry:
    """One unit in the pass, which may get sums of this machine several times.

    Attributes:
        staged: for each dtype and owner the first sum, ready to be sent.
        rest: for each dtype and owner all later sums, added up.
        present: positions of the parameters that have a gradient on this machine.
        results: for each dtype and owner the launched collective, or the sum itself if no other machine takes part.
    """

    number: int
    unit: ShardedUnit
    staged: list[list[Any]]
    rest: list[list[Tensor]]
    present: set[int] = field(default_factory=set)
    has_come: bool = False  # the first sums of all owners are there
    is_sent: bool = False
    results: list[list[Any]] = field(default_factory=list)

    def sent_dtype(self, at: int) -> torch.dtype:
        return self.unit.precision.of_sums(self.unit.groups[at][2])

    def describe(self) -> str:
        """Returns a text that has to be equal on all machines."""
        groups = enumerate(self.unit.groups)
        sizes = ", ".join(f"{layout.numel} {self.sent_dtype(at)}" for at, (_, layout, _) in groups)
        rest = "" if self.unit.requires_all_reduce else ", no all-reduce"
        return f"{_BACKWARD}\nunit {self.unit.name!r} ({sizes}{rest})"


class SumsOverMachines:
    """The sums of one pass over machines. Any thread may use it.

    Each unit is sent once, when this machine has summed it and all units before it have been sent, in the order in
    which they came on rank 0 in an earlier pass. What has not come by the end is zeros, and a mask says which gradients
    exist. Nothing is added to ``.grad`` before all masks have come.
    ``known_order``: the numbers of the units in rank 0's order; empty until `add_to_gradients` has learned it.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        slots: Sequence[torch.device],
        known_order: list[int],
        machines: MachineMesh,
        computing: Mapping[torch.device, torch.Stream],
    ) -> None:
        self._known_order, self._devices, self._computing = known_order, slots, computing
        self._machines, self._shard, self._replicate = machines, machines.shard, machines.replicate
        self._order = [*known_order] or [*reversed(range(len(units)))]
        self._lock = threading.Lock()
        self._entries = [
            _UnitEntry(i, unit, [[] for _ in unit.groups], [[] for _ in unit.groups])
            for i, unit in ((i, units[i]) for i in self._order)
            if unit.requires_gradient_sync and unit.groups
        ]
        self._entry_of = {entry.unit: entry for entry in self._entries}
        self._arrived: list[int] = []  # numbers of units in the order in which they came
        self._is_ended = not self._entries
        # Without a shard group, sums that wait for an all-reduce are sent to no other machine.
        self._has_others = self._shard is not None or any(entry.unit.requires_all_reduce for entry in self._entries)
        # With NCCL all launches have one order. Slots that share a device share a thread of the engine: it might wait
        # for a gather behind a sum that it has to make itself.
        self._waits_for_end = machines.all.state.has_nccl and len({*slots}) < len(slots)
        self._end: Result | None = None  # for each trainable parameter: has a gradient; for each unit: has a rest
        self._mask: list[bool] = []

    # ---- sums of this machine ----------------------------------------------------------------------------------------

    def take_part(self, unit: ShardedUnit, at: int, owner: int, total: Tensor) -> None:
        """Takes the sum of an owner for dtype number ``at``, made on the current streams. `end_unit` follows.

        ``total``: one part for each machine of the shard group. The caller may not use it any more.
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
        entry.staged[at].append(self._staged(entry, total.to(entry.sent_dtype(at))))

    def end_unit(self, unit: ShardedUnit, present: Collection[int]) -> None:
        """Sends all units whose turn has come, after all owners have given their sums of ``unit``."""
        entry = self._entry_of[unit]
        entry.present.update(present)
        if entry.has_come:
            return
        entry.has_come = True
        with self._lock:
            self._arrived.append(entry.number)
            for each in () if self._waits_for_end else self._entries:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, entry: _UnitEntry, at: int, owner: int, total: Tensor) -> None:
        if (waiting := entry.unit.partial) is not None:
            total.view(self._machines.shard_size, -1)[self._machines.shard_rank].add_(waiting.matrices[owner][at])

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _staged(self, entry: _UnitEntry, total: Tensor) -> Any:
        """Returns the total, staged on the current stream, or as it is if no other machine takes part."""
        if self._shard is not None:
            return stage(self._shard, total, total.numel() // self._shard.size, self._computing)
        if self._replicate is None or not entry.unit.requires_all_reduce:
            return total
        return stage(self._replicate, total)

    def _send(self, entry: _UnitEntry) -> None:
        entry.is_sent = True
        entry.results = [self._launch(entry, staged) for staged in entry.staged]

    def _launch(self, entry: _UnitEntry, staged: Sequence[Any]) -> list[Any]:
        """Launches the reduce-scatter over the shard group, and the all-reduce over the replicate group."""
        shard, replicate = self._shard, self._replicate if entry.unit.requires_all_reduce else None
        if shard is None and replicate is None:
            return [*staged]
        calls = [each.sum if shard is None else each.reduce_scatter for each in staged]
        over, then = (replicate, None) if shard is None else (shard, replicate)
        what = [f"the gradients of {entry.unit.name!r}"] * len(calls)
        return [*self._machines.lane.launch(_BACKWARD, what, calls, entry.describe(), over, then)]

    # ---- the end of the pass -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """The slots have delivered everything. Units that have not come take part with zeros."""
        if self._is_ended:
            return
        with self._lock, torch.no_grad(), streams_set(self._computing):
            self._is_ended = True
            for entry in self._entries:
                if not entry.is_sent:
                    if not entry.has_come:
                        self._fill(entry)
                    self._send(entry)
        for entry in self._entries:
            if (waiting := entry.unit.partial) is not None:
                entry.present.update(waiting.present)
        self._mask = [i in each.present for each in self._entries for i in each.unit.trainable]
        self._mask += [bool(each.rest[0]) for each in self._entries]
        if self._has_others:
            order = None if self._known_order else [*dict.fromkeys([*self._arrived, *self._order])]
            others = [] if self._machines.gathers is None else [self._machines.gathers]
            self._end = self._machines.lane.end(_BACKWARD, self._mask, others, order)

    def fail(self, error: BaseException) -> None:
        """Tells the other machines that the pass has failed on this one before its end."""
        if self._end is None and self._has_others:
            self._machines.all.state.fail(error)
        self._is_ended = True

    def _fill(self, entry: _UnitEntry) -> None:
        for at, (_, layout, dtype) in enumerate(entry.unit.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.shard_size * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(entry.sent_dtype(at), dtype), device=device)
                self._add_partial(entry, at, owner, zeros)
                entry.staged[at].append(self._staged(entry, zeros.to(entry.sent_dtype(at))))

    def add_to_gradients(self, add: _Add) -> None:
        """Waits for all sums, and calls ``add`` with them. If a machine is gone or has failed, it never does."""
        if not self._entries:
            return
        mask, order = (self._mask, None) if self._end is None else self._end.wait()
        if order is not None:
            self._known_order[:] = order
        flags = iter(mask)
        with torch.no_grad(), streams_set(self._computing):
            present = [[i for i in each.unit.trainable if next(flags)] for each in self._entries]
            rests = self._sums_of_rests([each for each in self._entries if next(flags)])
            of_entries = [[self._results(each, at, rests) for at in range(len(each.results))] for each in self._entries]
            for entry, totals in zip(self._entries, of_entries, strict=True):
                if (hook := entry.unit.all_reduce_hook) is not None and not self._stays_partial(entry.unit):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(entry, totals) for entry, totals in zip(self._entries, of_entries, strict=True)]
            if any(entry.unit.is_offloaded for entry in self._entries):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for entry, of_dtypes, found in zip(self._entries, parts, present, strict=True):
                self._set(entry.unit, of_dtypes, found, add)

    def _sums_of_rests(self, units: Sequence[_UnitEntry]) -> dict[int, list[list[Any]]]:
        """Sums the rests of these units. Returns the results by the units' numbers."""
        found: dict[int, list[list[Any]]] = {}
        for entry in units:
            found[entry.number] = results = []
            for at, (_, layout, _) in enumerate(entry.unit.groups):
                dtype, numel = entry.sent_dtype(at), self._machines.shard_size * layout.numel
                rest = entry.rest[at] or [torch.zeros(numel, dtype=dtype, device=device) for device in self._devices]
                staged = [self._staged(entry, total.to(dtype)) for total in rest]
                results.append(self._launch(entry, staged))
        return found

    def _results(self, entry: _UnitEntry, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """Waits for the sums of all owners, and returns them in the dtype in which they are added."""
        dtype = added_in(entry.sent_dtype(at), entry.unit.groups[at][2])
        sums = [_received(result, self._devices[i]).to(dtype) for i, result in enumerate(entry.results[at])]
        for i, result in enumerate(rests[entry.number][at] if entry.number in rests else ()):
            sums[i] = sums[i] + _received(result, self._devices[i])
        return sums

    def _parts(self, entry: _UnitEntry, totals: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Returns the owners' parts for ``.grad``, or sums that stay partial until a pass all-reduces them."""
        if self._stays_partial(entry.unit):
            return [[*of_owners] for of_owners in totals]
        parts = [
            [total.to(dtype) for total in of_owners]
            for of_owners, (_, _, dtype) in zip(totals, entry.unit.groups, strict=True)
        ]
        unit = entry.unit
        return [[*map(unit.to_host, of_owners)] for of_owners in parts] if unit.is_offloaded else parts

    def _set(self, unit: ShardedUnit, parts: Sequence[Sequence[Tensor]], present: Collection[int], add: _Add) -> None:
        unit.partial = None
        if not self._stays_partial(unit):
            add(unit, parts, present)
        elif present:
            unit.partial = WaitingSums(unit.groups, unit.parameters)
            unit.partial.matrices = dict(enumerate(zip(*parts, strict=True)))
            unit.partial.present.update(present)
            unit.partial.note()

    def _stays_partial(self, unit: ShardedUnit) -> bool:
        return self._replicate is not None and not unit.requires_all_reduce


def _received(result: Any, device: torch.device) -> Tensor:
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)
