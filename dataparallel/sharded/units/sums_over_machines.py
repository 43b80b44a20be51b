"""`SumsOverMachines` averages over machines what the slots of each have summed in one pass of backward.

A pass is one round of all machines. Each unit is sent once, as soon as this machine's slots have summed its gradients
and all units before it have been sent. The order is the one in which units came on rank 0 in an earlier pass. Nothing
is added to ``.grad`` before all sums have succeeded: a pass that fails on one machine changes no gradient on any.
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
from dataparallel.sharded.units.sums import PassGradients, added_in

if TYPE_CHECKING:
    from dataparallel.sharded.units.tree import Tree
    from dataparallel.sharded.units.unit import Unit


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
    unit: Unit
    staged: list[list[Any]]
    rest: list[list[Tensor]]
    present: set[int] = field(default_factory=set)
    has_come: bool = False  # the first sums of all owners are there
    is_sent: bool = False
    results: list[list[Any]] = field(default_factory=list)

    @property
    def gradients(self) -> UnitGradients:
        return self.unit.gradients

    @property
    def is_for_all(self) -> bool:
        """True if the unit is summed over the replicate group too."""
        return self.unit.requires_all_reduce

    def sent_dtype(self, at: int) -> torch.dtype:
        """Returns the dtype in which sums number ``at`` travel."""
        return self.unit.dtype_of_sums(self.gradients.groups[at][2])

    def describe(self) -> str:
        """Returns a text that has to be equal on all machines."""
        groups = self.gradients.groups
        sizes = ", ".join(f"{layout.numel} {self.sent_dtype(at)}" for at, (_, layout, _) in enumerate(groups))
        return f"unit {self.unit.name!r} ({sizes}{'' if self.is_for_all else ', no all-reduce'})"


class SumsOverMachines:
    """The sums of one pass over machines. Any thread may use it. ``computing``: each accelerator's computing stream."""

    def __init__(self, tree: Tree, machines: MachinesOfTree, computing: Mapping[torch.device, torch.Stream]) -> None:
        self._tree, self._machines, self._devices, self._computing = tree, machines, tree.slots, computing
        self._lock = threading.Lock()
        units = [(i, tree.units[i]) for i in tree.order_of_sums]
        self._entries = [
            _UnitEntry(i, unit, _nothing(unit), _nothing(unit))
            for i, unit in units
            if unit.requires_gradient_sync and unit.gradients.groups
        ]
        self._entry_of = {entry.unit: entry for entry in self._entries}
        self._arrived: list[int] = []  # numbers of units in the order in which they came
        self._is_ended = not self._entries
        # Without a shard group, sums that wait for an all-reduce are sent to no other machine.
        has_others = machines.shard is not None or any(entry.is_for_all for entry in self._entries)
        self._learns_order = has_others and not tree.is_order_known
        self._round: Round | None = None
        self._proposed_order: PendingResult | None = None  # of each rank
        self._end: PendingResult | None = None
        self._flags: list[bool] = []  # per trainable parameter: has a gradient; per unit: has a rest
        self._scattered: _UnitEntry | None = None  # the unit whose parts go over the replicate group next
        if self._entries and has_others:
            text = [entry.describe() for entry in self._entries]
            text.insert(0, f"learns the order of units: {self._learns_order}")
            self._round = machines.all.queue.begin_round("backward", "\n".join(text))

    # ---- sums of this machine ----------------------------------------------------------------------------------------

    def take_part(self, unit: Unit, at: int, owner: int, total: Tensor) -> None:
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

    def end_unit(self, unit: Unit, present: Collection[int]) -> None:
        """Sends all units whose turn has come, after all owners have given their sums of ``unit``."""
        entry = self._entry_of[unit]
        entry.present.update(present)
        if entry.has_come:
            return
        entry.has_come = True
        with self._lock:
            self._arrived.append(entry.number)
            for each in self._entries:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, entry: _UnitEntry, at: int, owner: int, total: Tensor) -> None:
        partial_sums = entry.gradients.partial
        if partial_sums is not None:
            total.view(self._machines.shard_size, -1)[self._machines.shard_rank].add_(partial_sums.totals[at][owner])

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _staged(self, entry: _UnitEntry, total: Tensor) -> Any:
        """Returns the total, staged on the current stream, or as it is if no other machine takes part."""
        shard, replicate = self._machines.shard, self._machines.replicate
        if shard is not None:
            return stage(shard, total, total.numel() // shard.size, self._computing)
        return stage(replicate, total) if replicate is not None and entry.is_for_all else total

    def _send(self, entry: _UnitEntry) -> None:
        """Launches a unit's reduce-scatter, and after it the all-reduce of the unit before.

        So an all-reduce, which waits for the reduce-scatter of its unit, does not hold up the next reduce-scatter.
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
            entry.results = [self._all_reduce(self._round, entry, parts) for parts in entry.results]

    def _scatter(self, round: Round | None, entry: _UnitEntry, staged: Sequence[Any]) -> list[Any]:
        """Launches the reduce-scatter over the shard group, for all owners together."""
        shard = self._machines.shard
        if shard is None:
            return [*staged]
        return _launched(round, entry, [partial(reduce_scatter, shard, each) for each in staged])

    def _all_reduce(self, round: Round | None, entry: _UnitEntry, parts: Sequence[Any]) -> list[Any]:
        """Launches the all-reduce over the replicate group of what `_scatter` has returned."""
        replicate = self._machines.replicate
        if replicate is None or not entry.is_for_all:
            return [*parts]
        calls = [partial(_all_reduce, replicate, each) for each in parts]
        return _launched(round, entry, calls, () if self._machines.shard is None else parts)

    # ---- the end of the pass -----------------------------------------------------------------------------------------

    def end_round(self) -> None:
        """Ends the round: the slots have delivered everything. Units that have not come take part with zeros."""
        if self._is_ended:
            return
        self._send_remaining()
        for entry in self._entries:
            if (partial_sums := entry.gradients.partial) is not None:
                entry.present.update(partial_sums.present)
        self._flags = [i in each.present for each in self._entries for i in each.unit.trainable]
        self._flags += [bool(each.rest[0]) for each in self._entries]
        if self._round is not None:
            self._end = self._round.end(self._flags)

    def fail_round(self, error: BaseException) -> None:
        """Tells the other machines that the pass has failed on this one, after sending what they wait for."""
        if self._is_ended:
            return
        self._send_remaining(has_failed=True)
        if self._round is not None:
            self._round.end([False] * sum(len(each.unit.trainable) + 1 for each in self._entries), error)

    def _send_remaining(self, has_failed: bool = False) -> None:
        """Sends units that have not come: zeros plus partial sums of earlier passes. Then proposes the order."""
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
                order = [*dict.fromkeys([*self._arrived, *self._tree.order_of_sums])]
                self._proposed_order = self._round.all_gather_object("the order of units", lambda: order)

    def _fill(self, entry: _UnitEntry, with_partial: bool) -> None:
        for at, (_, layout, dtype) in enumerate(entry.gradients.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.shard_size * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(entry.sent_dtype(at), dtype), device=device)
                if with_partial:
                    self._add_partial(entry, at, owner, zeros)
                entry.staged[at].append(self._staged(entry, zeros.to(entry.sent_dtype(at))))

    def add_to_gradients(self, summed: PassGradients) -> None:
        """Waits for all sums, and adds them to ``.grad``. If a machine is gone or has failed, none is changed."""
        if not self._entries:
            return
        flags = iter(self._flags if self._end is None else self._end.wait())  # each is true if it is on any machine
        with torch.no_grad(), streams_set(self._computing):
            present = [[i for i in each.unit.trainable if next(flags)] for each in self._entries]
            rests = self._sums_of_rests([each for each in self._entries if next(flags)])
            sums = [[self._results(each, at, rests) for at in range(len(each.results))] for each in self._entries]
            if self._proposed_order is not None:
                self._tree.learn_order(self._proposed_order.wait()[0])
            for entry, totals in zip(self._entries, sums, strict=True):
                if (hook := entry.unit.all_reduce_hook) is not None and not self._stays_partial(entry):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(entry, totals) for entry, totals in zip(self._entries, sums, strict=True)]
            if any(entry.unit.is_offloaded for entry in self._entries):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for entry, of_dtypes, found in zip(self._entries, parts, present, strict=True):
                self._set(entry, of_dtypes, found, summed)

    def _sums_of_rests(self, units: Sequence[_UnitEntry]) -> dict[int, list[list[Any]]]:
        """Sums the rests of these units, in a round of its own. Returns the results by the units' numbers."""
        if not units:
            return {}
        round, text = None, "\n".join(["again", *(entry.describe() for entry in units)])
        if self._round is not None:
            round = self._machines.all.queue.begin_round("backward", text)
        found: dict[int, list[list[Any]]] = {}
        for entry in units:
            found[entry.number] = results = []
            for at, (_, layout, _) in enumerate(entry.gradients.groups):
                dtype, numel = entry.sent_dtype(at), self._machines.shard_size * layout.numel
                rest = entry.rest[at] or [torch.zeros(numel, dtype=dtype, device=device) for device in self._devices]
                staged = [self._staged(entry, total.to(dtype)) for total in rest]
                results.append(self._all_reduce(round, entry, self._scatter(round, entry, staged)))
        if round is not None:
            round.end([]).wait()
        return found

    def _results(self, entry: _UnitEntry, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """Waits for the sums of all owners, and returns them in the dtype in which they are added."""
        dtype = added_in(entry.sent_dtype(at), entry.gradients.groups[at][2])
        sums = [_received(result, self._devices[i]).to(dtype) for i, result in enumerate(entry.results[at])]
        for i, result in enumerate(rests[entry.number][at] if entry.number in rests else ()):
            sums[i] = sums[i] + _received(result, self._devices[i])
        return sums

    def _parts(self, entry: _UnitEntry, totals: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Returns the owners' parts for ``.grad``, or sums that stay partial until a pass all-reduces them."""
        if self._stays_partial(entry):
            return [[*of_owners] for of_owners in totals]
        parts = [
            [total.to(dtype) for total in of_owners]
            for of_owners, (_, _, dtype) in zip(totals, entry.gradients.groups, strict=True)
        ]
        unit = entry.unit
        return [[*map(unit.to_host, of_owners)] for of_owners in parts] if unit.is_offloaded else parts

    def _set(
        self, entry: _UnitEntry, parts: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients
    ) -> None:
        gradients, parameters = entry.gradients, entry.unit.parameters
        gradients.partial = None
        if self._stays_partial(entry):
            if present:
                gradients.partial = PartialSums(gradients.groups, parameters, parts, present)
            return
        gradients.set_sums(parts, present, summed)
        summed.note(parameters[i] for i in present)

    def _stays_partial(self, entry: _UnitEntry) -> bool:
        return self._machines.replicate is not None and not entry.is_for_all


def _nothing(unit: Unit) -> list[list[Any]]:
    return [[] for _ in unit.gradients.groups]


def _launched(
    round: Round | None, entry: _UnitEntry, calls: Sequence[Callable[[], Transfer]], after: Sequence[PendingResult] = ()
) -> list[Any]:
    assert round is not None
    return round.launch_together([f"the gradients of {entry.unit.name!r}"] * len(calls), calls, after)


def _all_reduce(replicate: Machines, part: PendingResult | Staged) -> Transfer:
    return all_reduce(replicate, part.received() if isinstance(part, PendingResult) else part)


def _received(result: Any, device: torch.device) -> Tensor:
    """Returns the result of a collective on ``device``, ready on its current stream."""
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)
