"""`UnitSums` reduce-scatters the deliveries of all slots for one unit, and puts each owner's part into ``.grad``.

One call of ``comm.reduce_scatter`` sums for all owners, in slot order, so the bits are the same in every run. The
streams that add wait for an event after all deliveries were written. Deliveries and sums are memory of the computing
streams of their devices, which wait for the sums before this memory is used again (`passes.SumsOfPass`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.tensor import ShardedTensor, divided_like, is_divided_alike
from dataparallel.sharded.units.buffers import Layout, naming_out_of_memory
from dataparallel.sharded.units.shards import wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.passes import SumsOfPass
    from dataparallel.sharded.units.unit import Unit

DtypeGroup: TypeAlias = "tuple[list[int], Layout, torch.dtype]"
"""Parameters of one dtype that need gradients: their positions in the unit, their layout, the dtype."""


@dataclass
class Delivery:
    """The gradients that one slot has computed for one unit, and memory for its owner's part of the sum.

    Attributes:
        matrices: for each dtype the gradients in the layout of the gathered matrix, with a row for each owner on this
            machine. Over machines a row has the parts of this owner on every machine.
        sums: for each dtype memory for the sum of one row, on the slot's device.
        parts: the same in the dtype of the parameters; may share memory with ``sums``. Not used over machines.
        present: positions of the parameters that have a gradient.
        written: an event after the writes to all of these, on the slot's computing stream. ``None`` on the CPU.
    """

    matrices: list[Tensor]
    sums: list[Tensor]
    parts: list[Tensor]
    present: set[int]
    written: Event | None


def added_in(summed: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the sum, which has 32 bits for 16-bit numbers."""
    wide = torch.promote_types(summed, dtype)
    return torch.float32 if wide.itemsize < 4 and wide.is_floating_point else wide


class PassGradients:
    """The gradients of one backward: what units have summed, and what the engine has brought to parameters directly.

    Passes of several trees in one backward share it, because these trees may share units, and hooks run once.

    Where a parameter has a ``.grad``, sums are added to it as they come. A new gradient goes to ``.grad`` when the pass
    has succeeded: threads of a failed pass may still sum when the caller has zeroed all gradients, and what they sum
    must not become part of the next step. A gradient that hooks have to see goes to ``.grad`` after them.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, ShardedTensor] = {}
        self._new: dict[int, ShardedTensor] = {}  # that are not in `.grad` yet
        self._direct: list[tuple[ShardedTensor, Any]] = []  # parameters, and what the engine has brought
        self._found: list[tuple[ShardedTensor, int]] = []
        self._open_passes = 0
        self._has_failed = False

    def begin_pass(self, parameters: Iterable[ShardedTensor]) -> None:
        """Begins a pass. ``parameters``: all that it may reach. `end_pass` or `fail_pass` follows."""
        self._open_passes += 1
        grads = [grad for parameter in parameters if isinstance(grad := parameter.grad, ShardedTensor)]
        self._found += [(grad, grad._zeroed) for grad in grads]

    def add_direct(self, parameter: ShardedTensor, gradient: Tensor) -> None:
        """Adds a part of a gradient at the end of the backward, when the streams have waited for all sums."""
        self._direct.append((parameter, gradient))

    def take_direct(self, parameters: Collection[ShardedTensor]) -> list[tuple[ShardedTensor, Any]]:
        """Takes back what `add_direct` was given for these parameters."""
        keys = {*map(id, parameters)}
        taken = [pair for pair in self._direct if id(pair[0]) in keys]
        self._direct = [pair for pair in self._direct if id(pair[0]) not in keys]
        return taken

    def note(self, parameters: Iterable[ShardedTensor]) -> None:
        """Notes that these parameters have got gradients."""
        self._parameters.update((id(parameter), parameter) for parameter in parameters)

    def gradient_of(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """Returns the gradient that further sums of this pass are added to, if there is one."""
        new = self._new.get(id(parameter))
        return parameter.grad if new is None and not _torch.hooks_of(parameter) else new

    def set_gradient(self, parameter: ShardedTensor, gradient: ShardedTensor) -> None:
        """Sets the gradient that further sums of this pass are added to."""
        self.note([parameter])
        self._new[id(parameter)] = gradient

    def publish(self) -> None:
        """Makes new gradients the parameters' ``.grad``, except those that hooks have to see first.

        Those of parameters that other code has given a ``.grad`` meanwhile are added at the end of the backward.
        """
        if self._has_failed:
            raise RuntimeError(
                "this backward has lost gradients: it shares modules with another one, which has failed. Zero the "
                "gradients, and run it again"
            )
        for key in [*self._new]:
            parameter = self._parameters[key]
            if parameter.grad is None and not _torch.hooks_of(parameter):
                # In this order: another thread may add a sum meanwhile, and has to find the gradient.
                parameter.grad = self._new[key]
                del self._new[key]

    @torch.no_grad()
    def fail_pass(self) -> None:
        """Zeroes what was zeroed in place while the pass ran, which has failed: sums may have been added after that.

        The computing streams are current, and wait for these sums.
        """
        self._open_passes -= 1
        self._has_failed = True
        for grad, zeroed in self._found:
            if grad._zeroed != zeroed:
                for shard in grad._shards:  # an operator on the sharded tensor would use other streams in a backward
                    shard.zero_()

    @torch.no_grad()
    def end_pass(self) -> None:
        """Ends a pass. The last one completes the gradients and runs the parameters' hooks.

        The current streams have waited for the sums.
        """
        self._open_passes -= 1
        if self._open_passes:
            return
        for parameter, direct in self._direct:
            gradient = self.gradient_of(parameter)
            self.note([parameter])
            if gradient is None:
                self.set_gradient(parameter, direct.clone())  # other code may hold `direct`
            else:
                gradient.add_(direct)
        self._direct.clear()
        self.publish()
        for parameter in self._parameters.values():
            gradient = self._new.pop(id(parameter), None)
            if gradient is not None:
                gradient = _hooked(parameter, gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)


def _hooked(parameter: ShardedTensor, gradient: ShardedTensor) -> ShardedTensor:
    """Returns what the parameter's hooks make of its gradient."""
    for hook in [*(_torch.hooks_of(parameter) or {}).values()]:
        returned = hook(gradient)
        if returned is None:
            continue
        if not isinstance(returned, Tensor):
            raise TypeError(
                f"a hook on a parameter returns a tensor or None; {hook!r} returned {type(returned).__name__}"
            )
        if returned.dtype != gradient.dtype or returned.shape != gradient.shape:
            raise ValueError(
                f"a hook on a parameter was given a gradient of shape {tuple(gradient.shape)} and {gradient.dtype}, "
                f"and has to return one; {hook!r} returned one of shape {tuple(returned.shape)} and {returned.dtype}"
            )
        gradient = returned if is_divided_alike(returned, gradient) else divided_like(returned, gradient)  # type: ignore[assignment]
    return gradient


class UnitSums:
    """Sums the deliveries for one unit. One thread at a time uses it.

    Attributes:
        is_torn: `add_up` has failed after some owners, not all, had added their part to existing gradients.
    """

    def __init__(self, unit: Unit, groups: Sequence[DtypeGroup]) -> None:
        self._unit, self._groups = unit, groups
        self.is_torn = False

    def add_up(self, deliveries: Mapping[int, Delivery], sums: SumsOfPass, overwrite: bool) -> None:
        """Launches the sums of one round: a delivery of each slot, or of some slots at the end of the pass.

        ``overwrite``: the sums may write to the deliveries, which nobody needs if this fails.
        """
        present = {i for delivery in deliveries.values() for i in delivery.present}
        streams, slots = self._unit.streams, self._unit.slots
        written = [each.written for each in deliveries.values() if each.written is not None]
        all_written = streams.meet("deliveries", written)
        in_flight = [*deliveries.items()]
        of_owners: list[Delivery] = []  # with the memory for each owner's sum
        allocated: list[Event] = []
        totals: list[list[Tensor]] = [[] for _ in self._groups]  # for each dtype the parts of all owners
        with torch.no_grad():
            for owner in range(len(slots)):
                own = deliveries.get(owner)
                if own is None or not own.sums:
                    if own is None:
                        sums.release_deliveries(owner)  # of earlier units, as the slot has delivered nothing for this
                    own = self._empty_delivery(owner, deliveries, sums)
                    in_flight.append((owner, own))
                    allocated += [] if own.written is None else [own.written]
                of_owners.append(own)
            # These events come after all that the computing streams have done to existing gradients.
            wait_for(allocated if all_written is None else [all_written, *allocated], streams.adding.values())
            try:
                self._reduce_scatter(deliveries, of_owners, overwrite)
                for owner, own in enumerate(of_owners):
                    stream = streams.adding.get(slots[owner])
                    with streams_set({} if stream is None else {slots[owner]: stream}):
                        self._end_sum(owner, own, totals, present, sums)
            except BaseException:
                self.is_torn = any(totals) and self.adds_at_once(sums)
                # Sums that have been launched read the deliveries, which are dropped now.
                launched = [Event(stream) for stream in streams.adding.values()]
                wait_for(launched, sums.computing.values())
                raise
        # Each of these events comes after the copies to its stream, which read the deliveries.
        adding = {owner: streams.adding[slot] for owner, slot in enumerate(slots) if slot in streams.adding}
        after_reads = sums.note_sums(adding, partial(streams.meet, "sums"))
        for slot, delivery in in_flight:
            sums.hold_delivery(slot, delivery, after_reads)
        if sums.over_machines is not None:
            sums.over_machines.end_unit(self._unit, present)
            return
        if self._unit.is_offloaded:
            sums.host_additions.append(partial(self.add_parts, totals, present, sums.summed))
        else:
            self._set_gradients(totals, present, sums.summed)
        sums.summed.note(self._unit.parameters[i] for kept, _, _ in self._groups for i in kept if i in present)

    def add_parts(self, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients) -> None:
        """Adds all owners' parts to ``.grad``, or makes them ``.grad`` where there is none, on the current streams."""
        for owner in range(len(self._unit.slots)):
            self._add_to_gradients(owner, totals, present, summed)
        self._set_gradients(totals, present, summed)

    def _empty_delivery(self, owner: int, deliveries: Mapping[int, Delivery], sums: SumsOfPass) -> Delivery:
        """Returns a delivery without gradients, for an owner whose slot has no memory for a sum."""
        device = self._unit.slots[owner]
        like = next(iter(deliveries.values())).matrices
        with streams_set({device: sums.computing[device]} if device in sums.computing else {}):
            memory = [
                self._allocate([matrix.shape[1]], added_in(matrix.dtype, dtype), device)
                for matrix, (_, _, dtype) in zip(like, self._groups, strict=True)
            ]
            parts = [
                total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
                for total, (_, _, dtype) in zip(memory, self._groups, strict=True)
            ]
            stream = current_streams([device]).get(device)
        return Delivery([], memory, parts, set(), None if stream is None else Event(stream))

    def _reduce_scatter(self, deliveries: Mapping[int, Delivery], targets: Sequence[Delivery], overwrite: bool) -> None:
        """Launches the sums of all dtypes, into the memory that the owners have for them."""
        with streams_set(self._unit.streams.adding):
            for at in range(len(self._groups)):
                matrices = [deliveries[slot].matrices[at] for slot in sorted(deliveries)]
                comm.reduce_scatter(matrices, [own.sums[at] for own in targets], self._allocate, overwrite)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        number_of_bytes = self._unit.gradients.full_bytes // len(self._unit.slots)
        with naming_out_of_memory("summed gradients", self._unit.name, device, number_of_bytes):
            return torch.empty(shape, dtype=dtype, device=device)

    def _end_sum(
        self, owner: int, own: Delivery, totals: Sequence[list[Tensor]], present: Collection[int], sums: SumsOfPass
    ) -> None:
        """Puts the owner's part into ``totals`` and adds it to existing gradients, or over machines passes it on."""
        unit = self._unit
        factor = unit.gradient_divide_factor * (1 if unit.machines is None else unit.machines.ranks)
        for at, (total, part, parts_of_owners) in enumerate(zip(own.sums, own.parts, totals, strict=True)):
            if factor != 1:
                total.div_(factor)
            if sums.over_machines is not None:
                sums.over_machines.take_part(unit, at, owner, total)
                continue
            if unit.all_reduce_hook is not None:
                unit.all_reduce_hook(total)
            if part is not total:
                part.copy_(total)
            parts_of_owners.append(unit.to_host(part) if unit.is_offloaded else part)
        if self.adds_at_once(sums):
            sums.added_to += self._add_to_gradients(owner, totals, present, sums.summed)

    def adds_at_once(self, sums: SumsOfPass) -> bool:
        """True if sums are added to ``.grad`` when they are launched, not at the end of the pass."""
        return sums.over_machines is None and not self._unit.is_offloaded

    def _add_to_gradients(
        self, owner: int, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients
    ) -> list[Tensor]:
        """Adds the owner's part of each sum to its shards of existing gradients, and returns these shards."""
        shards: list[Tensor] = []
        additions: list[Tensor] = []
        for (kept, layout, _), of_owners in zip(self._groups, totals, strict=True):
            grads = [summed.gradient_of(self._unit.parameters[i]) for i in kept]
            if all(grad is None for grad in grads):
                continue
            for i, grad, part in zip(kept, grads, layout.parts_of(of_owners[owner], owner), strict=True):
                if grad is not None and i in present:
                    shards.append(grad._shards[owner])
                    additions.append(part)
        if shards:
            _torch.foreach_add_(shards, additions)
        return shards

    def _set_gradients(
        self, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients
    ) -> None:
        """Makes the owners' parts the gradients of parameters that have none."""
        for (kept, layout, _), of_owners in zip(self._groups, totals, strict=True):
            if all(summed.gradient_of(self._unit.parameters[i]) is not None for i in kept):
                continue
            parts = [layout.parts_of(flat, owner) for owner, flat in enumerate(of_owners)]
            for at, i in enumerate(kept):
                parameter = self._unit.parameters[i]
                if summed.gradient_of(parameter) is None and i in present:
                    shards = [of_owner[at] for of_owner in parts]
                    gradient = ShardedTensor(shards, parameter.placement, parameter.shape, devices=parameter.devices)
                    summed.set_gradient(parameter, gradient)
