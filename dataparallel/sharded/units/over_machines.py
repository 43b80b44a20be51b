"""`MachinesOfTree` has the process groups of a tree, and `SourceOverMachines` all-gathers shards over processes.

A machine is one process. Parameters are sharded over the owners of this machine and, if there is a *shard* group, over
the owners of all its machines. The machines of the *replicate* group have the same shards; `SumsOverMachines` averages
what the slots of each have summed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.machines.collectives import all_gather, reduce_scatter, stage
from dataparallel.machines.group import Result
from dataparallel.machines.lanes import Lane, Machines, masks_of
from dataparallel.machines.peer_rounds import PeerRounds
from dataparallel.machines.start import send_values
from dataparallel.sharded.placements import Owners
from dataparallel.sharded.units.buffers import added_in
from dataparallel.sharded.units.gradients import PartialSums
from dataparallel.sharded.units.shards import OwnedShards, PullSource

if TYPE_CHECKING:
    from dataparallel.sharded.units.tree import SumsOfPass, Tree
    from dataparallel.sharded.units.unit import Unit

_BACKWARD = "backward"


class MachinesOfTree:
    """The groups of a tree: machines to shard over, to replicate over, or both (a row and a column of a mesh).

    Steps have one lane over all machines. Gathers have another one, so that neither waits for the other.

    Attributes:
        given: the two groups that were given, ``shard`` first.
        all: the machines of both groups.
        shard, replicate: the groups over which gradients are reduce-scattered, and all-reduced afterwards.
        lane, gathers: the lanes; ``gathers`` is ``None`` if parameters are not sharded over machines.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None) -> None:
        self.given = shard, replicate
        # All ranks come here in one order: they make the same lanes.
        if shard is not None and replicate is not None:
            self.all = shard.product(replicate)
        else:
            first = shard or replicate
            assert first is not None
            self.all = first
        self.shard = None if shard is None else self.all.part(shard.ranks)
        self.replicate = None if replicate is None else self.all.part(replicate.ranks)
        self.lane = self.all.lane("steps")
        self.gathers = None if self.shard is None else self.shard.lane("gathers")
        self.peers = PeerRounds(self.all)
        self.shard_size, self.shard_rank = (1, 0) if shard is None else (shard.size, shard.rank)

    def make_communicators(self, slots: Sequence[torch.device]) -> None:
        """Makes NCCL's communicators, on all machines in one order: rows, columns, then the first device of each."""
        for machines in (self.shard, self.replicate):
            if machines is not None:
                machines.make_communicators(slots)
        self.all.make_communicators(slots[:1])

    def describe(self, slots: Sequence[torch.device]) -> dict[str, str]:
        """Describes, for `machines.start.compare`, the groups and from which devices of each the slots send."""
        groups = {"to shard over": self.shard, "to replicate over": self.replicate}
        if all(groups.values()):
            groups["in all"] = self.all
        return {
            name: f"{machines.size}, from {', '.join(machines.names_of(slots))}"
            for name, machines in groups.items()
            if machines is not None
        }

    def owners(self, slots: Sequence[torch.device]) -> Sequence[torch.device]:
        """Returns the owners of parameters that are sharded over these slots."""
        return slots if self.shard is None else Owners(slots, self.shard)

    def send_first_values(self, name: str, flats: Sequence[Tensor]) -> None:
        """Copies the values of a unit's flat shards, which are new, from the first machine that has the same shards."""
        if self.replicate is not None:
            send_values(self.replicate.words, {f"shard {i} of {name}": flat for i, flat in enumerate(flats)})


class SourceOverMachines(PullSource):
    """The tensors that slots pull: for each owner its shards of all machines, one after the other."""

    def __init__(self, unit: Unit, owned: OwnedShards, pulls: int, lane: Lane, epoch: int) -> None:
        super().__init__(unit, owned, pulls)
        self._lane, self._epoch, self._name = lane, epoch, unit.name
        self._launched: list[Result] = []

    @property
    def is_plain(self) -> bool:
        """Always false: slots pull copies, which have the shards of other machines."""
        return False

    def send(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches the all-gather. ``ready``: for each device an event after which its shards may be read."""
        machines, owned = self._lane.machines, self._owned
        with self._copying(ready):
            flats = map(self._cast, owned.flats, owned.owners)
            staged = [stage(machines, flat, machines.size * flat.numel()) for flat in flats]
        self._launched = self._lane.launch(
            "gather",
            [f"the parameters of {self._name!r} for {owner}" for owner in owned.owners],
            [partial(all_gather, shard) for shard in staged],
            f"gather\n{len(staged)} x {owned.layout.numel} {self._dtype} of {self._name!r}",
            epoch=self._epoch,
        )

    def _cast(self, flat: Tensor, owner: torch.device) -> Tensor:
        if flat.device != owner and not self._lane.machines.can_send(owner):
            return flat.to(self._dtype)  # stays in host memory, and is sent from there
        return flat.to(owner, non_blocking=True).to(self._dtype)

    def pieces(self, ready: Mapping[torch.device, Event]) -> tuple[list[Tensor], Mapping[torch.device, Event]]:
        """See `PullSource.pieces`. The calling thread waits until the shards of all machines are there, or raises."""
        return super().pieces({})

    def _copy(self) -> list[Tensor]:
        return [
            launched.wait().to(owner, non_blocking=True)
            for launched, owner in zip(self._launched, self._owned.owners, strict=True)
        ]


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

    def sent_dtype(self, at: int) -> torch.dtype:
        return self.unit.dtype_of_sums(self.unit.gradients.groups[at][2])

    def describe(self) -> str:
        """Returns a text that has to be equal on all machines."""
        groups = self.unit.gradients.groups
        sizes = ", ".join(f"{layout.numel} {self.sent_dtype(at)}" for at, (_, layout, _) in enumerate(groups))
        rest = "" if self.unit.requires_all_reduce else ", no all-reduce"
        return f"{_BACKWARD}\nunit {self.unit.name!r} ({sizes}{rest})"


class SumsOverMachines:
    """The sums of one pass over machines. Any thread may use it. ``computing``: each accelerator's computing stream.

    Each unit is sent once, when this machine has summed it and all units before it have been sent, in the order in
    which they came on rank 0 in an earlier pass. What has not come by the end is zeros, and a mask says which gradients
    exist. Nothing is added to ``.grad`` before all masks have come.
    """

    def __init__(self, tree: Tree, machines: MachinesOfTree, computing: Mapping[torch.device, torch.Stream]) -> None:
        self._tree, self._machines, self._devices, self._computing = tree, machines, tree.slots, computing
        self._lock = threading.Lock()
        self.epoch = machines.all.epoch
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
        self._has_others = machines.shard is not None or any(entry.unit.requires_all_reduce for entry in self._entries)
        # With NCCL all launches have one order. Slots that share a device share a thread of the engine: it might wait
        # for a gather behind a sum that it has to make itself.
        self._waits_for_end = machines.all.has_nccl and len({*tree.slots}) < len(tree.slots)
        self._end: Result | None = None  # for each trainable parameter: has a gradient; for each unit: has a rest
        self._mask: list[bool] = []
        self._scattered: _UnitEntry | None = None  # the unit whose parts go over the replicate group next

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
            for each in () if self._waits_for_end else self._entries:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, entry: _UnitEntry, at: int, owner: int, total: Tensor) -> None:
        partial_sums = entry.unit.gradients.partial
        if partial_sums is not None:
            total.view(self._machines.shard_size, -1)[self._machines.shard_rank].add_(partial_sums.totals[at][owner])

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _staged(self, entry: _UnitEntry, total: Tensor) -> Any:
        """Returns the total, staged on the current stream, or as it is if no other machine takes part."""
        shard, replicate = self._machines.shard, self._machines.replicate
        if shard is not None:
            return stage(shard, total, total.numel() // shard.size, self._computing)
        return stage(replicate, total) if replicate is not None and entry.unit.requires_all_reduce else total

    def _send(self, entry: _UnitEntry) -> None:
        """Launches a unit's reduce-scatter, and after it the all-reduce of the unit before.

        So an all-reduce, which waits for the reduce-scatter of its unit, does not hold up the next reduce-scatter.
        """
        entry.is_sent = True
        entry.results = [self._scatter(entry, staged) for staged in entry.staged]
        self._send_scattered()
        self._scattered = entry
        if self._machines.shard is None or self._machines.replicate is None:
            self._send_scattered()

    def _send_scattered(self) -> None:
        entry, self._scattered = self._scattered, None
        if entry is not None:
            entry.results = [self._all_reduce(entry, parts) for parts in entry.results]

    def _scatter(self, entry: _UnitEntry, staged: Sequence[Any]) -> list[Any]:
        """Launches the reduce-scatter over the shard group, for all owners together."""
        shard, what = self._machines.shard, [f"the gradients of {entry.unit.name!r}"] * len(staged)
        if shard is None:
            return [*staged]
        calls, lane = [partial(reduce_scatter, each) for each in staged], self._machines.lane
        return [*lane.launch(_BACKWARD, what, calls, entry.describe(), epoch=self.epoch, over=shard)]

    def _all_reduce(self, entry: _UnitEntry, parts: Sequence[Any]) -> list[Any]:
        """Launches the all-reduce over the replicate group of what `_scatter` has returned."""
        replicate, what = self._machines.replicate, [f"the gradients of {entry.unit.name!r}"] * len(parts)
        if replicate is None or not entry.unit.requires_all_reduce:
            return [*parts]
        options = {"epoch": self.epoch, "over": replicate, "text": entry.describe()}
        if self._machines.shard is not None:
            options["after"] = parts
        return [*self._machines.lane.add_sums(_BACKWARD, what, parts, self._devices[0], **options)]

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
            self._send_scattered()
        for entry in self._entries:
            if (partial_sums := entry.unit.gradients.partial) is not None:
                entry.present.update(partial_sums.present)
        self._mask = [i in each.present for each in self._entries for i in each.unit.trainable]
        self._mask += [bool(each.rest[0]) for each in self._entries]
        if self._has_others:
            order = None
            if not self._tree.is_order_known:
                order = [*dict.fromkeys([*self._arrived, *self._tree.order_of_sums])]
            gathers = self._machines.gathers
            others = [] if gathers is None else [gathers]
            self._end = self._machines.lane.end(_BACKWARD, self._mask, epoch=self.epoch, others=others, extra=order)

    def fail(self, error: BaseException) -> None:
        """Tells the other machines that the pass has failed on this one before its end."""
        if self._end is None and self._has_others:
            self._machines.all.state.leave(self.epoch, error)
        self._is_ended = True

    def _fill(self, entry: _UnitEntry) -> None:
        for at, (_, layout, dtype) in enumerate(entry.unit.gradients.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.shard_size * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(entry.sent_dtype(at), dtype), device=device)
                self._add_partial(entry, at, owner, zeros)
                entry.staged[at].append(self._staged(entry, zeros.to(entry.sent_dtype(at))))

    def add_to_gradients(self, sums: SumsOfPass) -> None:
        """Waits for all sums, and adds them to ``.grad``. If a machine is gone or has failed, none is changed."""
        if not self._entries:
            return
        mask = iter(self._mask if self._end is None else self._said(self._end))
        with torch.no_grad(), streams_set(self._computing):
            present = [[i for i in each.unit.trainable if next(mask)] for each in self._entries]
            rests = self._sums_of_rests([each for each in self._entries if next(mask)])
            of_entries = [[self._results(each, at, rests) for at in range(len(each.results))] for each in self._entries]
            for entry, totals in zip(self._entries, of_entries, strict=True):
                if (hook := entry.unit.all_reduce_hook) is not None and not self._stays_partial(entry):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(entry, totals) for entry, totals in zip(self._entries, of_entries, strict=True)]
            if any(entry.unit.is_offloaded for entry in self._entries):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for entry, of_dtypes, found in zip(self._entries, parts, present, strict=True):
                self._set(entry, of_dtypes, found, sums)

    def _said(self, end: Result) -> list[bool]:
        """Waits for all masks, and learns the order of rank 0. An entry is true if it is true on any machine."""
        mask, orders = masks_of(end)
        if orders[0] is not None:
            self._tree.order_of_sums, self._tree.is_order_known = orders[0], True
        return mask

    def _sums_of_rests(self, units: Sequence[_UnitEntry]) -> dict[int, list[list[Any]]]:
        """Sums the rests of these units. Returns the results by the units' numbers."""
        found: dict[int, list[list[Any]]] = {}
        for entry in units:
            found[entry.number] = results = []
            for at, (_, layout, _) in enumerate(entry.unit.gradients.groups):
                dtype, numel = entry.sent_dtype(at), self._machines.shard_size * layout.numel
                rest = entry.rest[at] or [torch.zeros(numel, dtype=dtype, device=device) for device in self._devices]
                staged = [self._staged(entry, total.to(dtype)) for total in rest]
                results.append(self._all_reduce(entry, self._scatter(entry, staged)))
        return found

    def _results(self, entry: _UnitEntry, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """Waits for the sums of all owners, and returns them in the dtype in which they are added."""
        dtype = added_in(entry.sent_dtype(at), entry.unit.gradients.groups[at][2])
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
            for of_owners, (_, _, dtype) in zip(totals, entry.unit.gradients.groups, strict=True)
        ]
        unit = entry.unit
        return [[*map(unit.to_host, of_owners)] for of_owners in parts] if unit.is_offloaded else parts

    def _set(
        self, entry: _UnitEntry, parts: Sequence[Sequence[Tensor]], present: Collection[int], sums: SumsOfPass
    ) -> None:
        gradients, parameters = entry.unit.gradients, entry.unit.parameters
        gradients.partial = None
        if self._stays_partial(entry):
            if present:
                gradients.partial = PartialSums(gradients.groups, parameters, parts, present)
            return
        gradients.add_to_pass(parts, present, sums)

    def _stays_partial(self, entry: _UnitEntry) -> bool:
        return self._machines.replicate is not None and not entry.unit.requires_all_reduce


def _nothing(unit: Unit) -> list[list[Any]]:
    return [[] for _ in unit.gradients.groups]


def _received(result: Any, device: torch.device) -> Tensor:
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)
