"""Adds up what the slots bring for one unit: each owner gets its part of the sum, which becomes or joins ``.grad``.

A sum is made for all owners by one call (``comm.reduce_scatter``), in slot order, so it has the same bits in every run.
The streams that add wait for an event after all matrices were written. Matrices and results belong to the computing
streams of their devices, which wait for the sums before that memory is used again (`passes.SumsOfPass`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

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

Group: TypeAlias = "tuple[list[int], Layout, torch.dtype]"
"""Parameters of one dtype that need gradients: their positions in the unit, their layout, the dtype."""


@dataclass
class Delivery:
    """What one slot brings for one unit.

    Attributes:
        matrices: for each dtype the gradients in the layout of the gathered matrix, with a row for each owner on this
            machine: over machines it has the owner's parts on all of them.
        sums: for each dtype memory on the slot's device for its part of the sum.
        parts: the same in the dtype of the parameters, which may be the same memory. Not used over machines.
        present: positions of the parameters that have a gradient.
        made: after the writes to all of this, on the slot's computing stream. ``None`` on the CPU.
    """

    matrices: list[Tensor]
    sums: list[Tensor]
    parts: list[Tensor]
    present: set[int]
    made: Event | None


def added_in(summed: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum: sums of 16-bit numbers are made in 32 bits."""
    wide = torch.promote_types(summed, dtype)
    return torch.float32 if wide.itemsize < 4 and wide.is_floating_point else wide


class PassGradients:
    """The parameters of all units of a tree that have got gradients in one pass."""

    def __init__(self) -> None:
        self._parameters: dict[int, ShardedTensor] = {}
        self._apart: dict[int, ShardedTensor] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def note(self, parameters: Iterable[ShardedTensor]) -> None:
        """These have got gradients."""
        self._parameters.update((id(parameter), parameter) for parameter in parameters)

    def gradient_of(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """What a sum of this pass is added to, if there is one."""
        return self._apart.get(id(parameter)) if _torch.hooks_of(parameter) else parameter.grad

    def set_gradient(self, parameter: ShardedTensor, gradient: ShardedTensor) -> None:
        """Makes the first sum what later ones are added to."""
        if _torch.hooks_of(parameter):
            self._apart[id(parameter)] = gradient
        else:
            parameter.grad = gradient

    @torch.no_grad()
    def run_hooks(self) -> None:
        """Runs the hooks of all these parameters, on the current streams, which have waited for the sums.

        Raises:
            TypeError, ValueError: a hook has returned something that cannot take the place of the gradient.
        """
        for parameter in self._parameters.values():
            gradient = self._apart.pop(id(parameter), None)
            if gradient is not None:
                _accumulate(parameter, _hooked(parameter, gradient))
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)


def _hooked(parameter: ShardedTensor, gradient: ShardedTensor) -> ShardedTensor:
    """What the parameter's hooks make of its gradient."""
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


def _accumulate(parameter: ShardedTensor, gradient: ShardedTensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class UnitSums:
    """The sums of one unit. One thread at a time uses it.

    Attributes:
        is_torn: `add_up` has failed when some owners had added their part to gradients that were there already.
    """

    def __init__(self, unit: Unit, groups: Sequence[Group]) -> None:
        self._unit, self._groups = unit, groups
        self.is_torn = False

    def add_up(self, found: Mapping[int, Delivery], sums: SumsOfPass, overwrite: bool) -> None:
        """Launches the sums of one round.

        ``overwrite``: nobody needs what slots have delivered if that fails.
        """
        present = {i for delivery in found.values() for i in delivery.present}
        streams, slots = self._unit.streams, self._unit.slots
        made = streams.meet("deliveries", [delivery.made for delivery in found.values() if delivery.made is not None])
        in_flight = [*found.items()]
        owns: list[Delivery] = []
        new: list[Event] = []
        totals: list[list[Tensor]] = [[] for _ in self._groups]  # for each dtype the parts of all owners
        with torch.no_grad():
            for owner in range(len(slots)):
                own = found.get(owner)
                if own is None or not own.sums:
                    if own is None:
                        sums.release(owner)  # what follows is for an earlier unit: its slot delivers nothing itself
                    own = self._room(owner, found, sums)
                    in_flight.append((owner, own))
                    new += [] if own.made is None else [own.made]
                owns.append(own)
            # All matrices, and the memory of the sums, were made after all that the computing streams did to gradients
            # that there are already.
            wait_for(new if made is None else [made, *new], streams.adding.values())
            try:
                self._add(found, owns, overwrite)
                for owner, own in enumerate(owns):
                    stream = streams.adding.get(slots[owner])
                    with streams_set({} if stream is None else {slots[owner]: stream}):
                        self._end_sum(owner, own, totals, present, sums)
                    if stream is not None:
                        sums.added[owner] = Event(stream)
            except BaseException:
                self.is_torn = any(totals) and not self._unit.is_offloaded and sums.over_machines is None
                # Deliveries are dropped now, which sums that have been launched read.
                launched = [Event(stream) for stream in streams.adding.values()]
                wait_for(launched, sums.computing.values())
                raise
        read = sums.latest = streams.meet("sums", sums.added.values())  # each follows the copies to its stream
        for slot, delivery in in_flight:
            sums.hold(slot, delivery, read)
        if sums.over_machines is not None:
            sums.over_machines.end_unit(self._unit, present)
            return
        if self._unit.is_offloaded:
            sums.waiting.append(partial(self.add_parts, totals, present, sums.summed))
        else:
            self._set_gradients(totals, present, sums.summed)
        sums.summed.note(self._unit.parameters[i] for kept, _, _ in self._groups for i in kept if i in present)

    def add_parts(self, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients) -> None:
        """Adds the owners' parts to gradients, or makes them that, on the current streams."""
        for owner in range(len(self._unit.slots)):
            self._add_to_gradients(owner, totals, present, summed)
        self._set_gradients(totals, present, summed)

    def _room(self, owner: int, found: Mapping[int, Delivery], sums: SumsOfPass) -> Delivery:
        """A delivery without gradients, for an owner whose slot has no memory for a sum."""
        device = self._unit.slots[owner]
        like = next(iter(found.values())).matrices
        with streams_set({device: sums.computing[device]} if device in sums.computing else {}):
            memory = [
                self._memory([matrix.shape[1]], added_in(matrix.dtype, dtype), device)
                for matrix, (_, _, dtype) in zip(like, self._groups, strict=True)
            ]
            parts = [
                total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
                for total, (_, _, dtype) in zip(memory, self._groups, strict=True)
            ]
            made = [Event(stream) for stream in current_streams([device]).values()]
        return Delivery([], memory, parts, set(), made[0] if made else None)

    def _add(self, found: Mapping[int, Delivery], owns: Sequence[Delivery], overwrite: bool) -> None:
        """Launches the sums of all dtypes, into the memory that the owners have for them."""
        with streams_set(self._unit.streams.adding):
            for at in range(len(self._groups)):
                matrices = [found[slot].matrices[at] for slot in sorted(found)]
                comm.reduce_scatter(matrices, [own.sums[at] for own in owns], self._memory, overwrite)

    def _memory(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        number_of_bytes = self._unit.gradients.full_bytes // len(self._unit.slots)
        with naming_out_of_memory("summed gradients", self._unit.name, device, number_of_bytes):
            return torch.empty(shape, dtype=dtype, device=device)

    def _end_sum(
        self, owner: int, own: Delivery, totals: Sequence[list[Tensor]], present: Collection[int], sums: SumsOfPass
    ) -> None:
        """The owner has added all rows: its part goes into ``totals``, and to gradients that there are already.

        Over machines it is sent instead.
        """
        unit = self._unit
        factor = unit.gradient_divide_factor * (1 if unit.machines is None else unit.machines.ranks)
        for at, (total, part, of_owners) in enumerate(zip(own.sums, own.parts, totals, strict=True)):
            if factor != 1:
                total.div_(factor)
            if sums.over_machines is not None:
                sums.over_machines.take_part(unit, at, owner, total)
                continue
            if unit.all_reduce_hook is not None:
                unit.all_reduce_hook(total)
            if part is not total:
                part.copy_(total)
            of_owners.append(unit.to_host(part) if unit.is_offloaded else part)
        if sums.over_machines is None and not unit.is_offloaded:
            sums.added_to += self._add_to_gradients(owner, totals, present, sums.summed)

    def _add_to_gradients(
        self, owner: int, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients
    ) -> list[Tensor]:
        """Adds the owner's part to gradients that there are already, and returns the owner's parts of these."""
        sums_to: list[Tensor] = []
        additions: list[Tensor] = []
        for (kept, layout, _), of_owners in zip(self._groups, totals, strict=True):
            grads = [summed.gradient_of(self._unit.parameters[i]) for i in kept]
            if all(grad is None for grad in grads):
                continue
            for i, grad, part in zip(kept, grads, layout.parts_of(of_owners[owner], owner), strict=True):
                if grad is not None and i in present:
                    sums_to.append(grad._shards[owner])
                    additions.append(part)
        if sums_to:
            _torch.foreach_add_(sums_to, additions)
        return sums_to

    def _set_gradients(
        self, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients
    ) -> None:
        """Makes the parts the gradients of parameters that have none."""
        for (kept, layout, _), of_owners in zip(self._groups, totals, strict=True):
            if all(summed.gradient_of(self._unit.parameters[i]) is not None for i in kept):
                continue
            parts = [layout.parts_of(flat, owner) for owner, flat in enumerate(of_owners)]
            for at, i in enumerate(kept):
                parameter = self._unit.parameters[i]
                if summed.gradient_of(parameter) is None and i in present:
                    of_parameter = [of_owner[at] for of_owner in parts]
                    whole = ShardedTensor(of_parameter, parameter.placement, parameter.shape, devices=parameter.devices)
                    summed.set_gradient(parameter, whole)
