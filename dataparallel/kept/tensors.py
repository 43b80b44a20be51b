"""Copies of a module's parameters and buffers that are used again: memory and tensors, refreshed in place.

Values are sent at every call, by one copy for each bucket and device. A copy is used again if nobody else holds a
part of it and it is what it was: ``forward`` may have returned a parameter, stored a view of it, made a graph over it,
given it other memory (``.data =``) or a gradient. Otherwise the copy is left to its holder and a new one is made;
``ownership`` tells who holds what. Only ``kept.replicas`` uses this room; it is for calls that record no graph, and
knows no modules but by their plan.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch, comm, ownership
from dataparallel.comm.buckets import Bucket, flatten, plan_buckets, unflatten
from dataparallel.comm.copies import alias
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.modules.plan import ModulePlan
from dataparallel.streams.current import current_streams

__all__ = ["KeptCopies"]


class KeptCopies:
    """At most one copy for each slot on another device than the first; for one thread at a time.

    Isolated slots count as being on other devices. What is kept of them, other calls do not use, and the reverse.
    """

    def __init__(self) -> None:
        self._kinds: list[Any] = []
        self._buckets: list[Bucket] = []
        self._singles: list[int] = []
        self._copies: dict[int, _Copy] = {}

    def refreshed(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int) -> list[list[Tensor]]:
        """The plan's tensors for each slot, with the values that they have now; parameters are ``nn.Parameter``.

        Parameters of slots on one device share memory, as do those on the first slot's device with the source's, unless
        slots are isolated; buffers are each slot's own, but on slot 0 the source's.
        """
        # Tensors made in inference mode could not be refreshed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            return self._refreshed(plan, slots, cap_bytes)

    def _refreshed(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int) -> list[list[Tensor]]:
        self._plan_buckets(plan, cap_bytes)
        copies = [list(plan.tensors) for _ in slots]
        isolated = are_slots_isolated()
        # For each slot the one whose parameters it has.
        homes = [slot if isolated else slots.index(device) for slot, device in enumerate(slots)]
        away = [slot for slot, home in enumerate(homes) if slot == home and slot > 0]
        if away:
            self._send(plan, slots, away, copies)
        parameters = set(plan.parameters)
        buffers = [i for i in range(len(plan.tensors)) if i not in parameters]
        for slot, home in enumerate(homes):
            if slot in away:
                continue
            for i in plan.parameters:
                copies[slot][i] = _as_parameter(alias(copies[home][i], slot), plan.tensors[i])
            if slot != home:
                here = [slots[slot]] * 2
                own = comm.broadcast_coalesced([copies[home][i] for i in buffers], here, own_storage=True)[1]
                for i, buffer in zip(buffers, own, strict=True):
                    copies[slot][i] = buffer
        return copies

    def _plan_buckets(self, plan: ModulePlan, cap_bytes: int) -> None:
        """Plans anew where tensors are of other kinds than before: ``.data =`` may change all but their class."""
        kinds: list[Any] = [cap_bytes, are_slots_isolated(), plan.parameters, *map(_kind, plan.tensors)]
        if kinds != self._kinds:
            self._copies = {}
            self._buckets, self._singles = plan_buckets(plan.tensors, cap_bytes)
            self._kinds = kinds

    def end_call(self) -> None:
        """Lets go of copies on which the last call has left something: an attribute, a gradient, other memory.

        Of all of them, where nobody can tell whether they may be used again.
        """
        told = ownership.can_be_told()
        self._copies = {slot: copy for slot, copy in self._copies.items() if copy.end_call() and told}

    def _send(self, plan: ModulePlan, slots: list[torch.device], away: list[int], copies: list[list[Tensor]]) -> None:
        sources = [flatten(bucket, plan.tensors) for bucket in self._buckets]
        targets: list[list[Tensor]] = [[] for _ in sources]
        positions = [i for bucket in self._buckets for i in bucket.indices]
        streams = current_streams(slots)
        for slot in away:
            device = slots[slot]
            kept, stream = self._copies.get(slot), streams.get(device)
            if kept is None or not kept.can_be_used_again(stream):
                # Its memory is needed for the new one.
                self._copies.pop(slot, None)
                kept = None
                kept = self._copies[slot] = _Copy(plan, self._buckets, sources, device, stream)
            for of_bucket, flat in zip(targets, kept.to_refresh(), strict=True):
                of_bucket.append(flat)
            copy = copies[slot]
            for i, part in zip(positions, kept.parts, strict=True):
                copy[i] = part
        for source, flats in zip(sources, targets, strict=True):
            comm.broadcast(source, out=flats)
        parameters = set(plan.parameters)
        for i in self._singles:
            source = plan.tensors[i]
            # The first place is the source's: on its device others have copies only where slots are isolated.
            (_, *sent) = comm.broadcast(source, [slots[0], *(slots[slot] for slot in away)])
            for slot, single in zip(away, sent, strict=True):
                copies[slot][i] = _as_parameter(single, source) if i in parameters else single


def _kind(tensor: Tensor) -> Any:
    """What `plan_buckets`, and whether copies are to need gradients, depend on."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    bits = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), bool(tensor.__dict__)
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits


class _Copy:
    """What travels flat, on one device: a flat buffer for each bucket, and the tensors in them."""

    def __init__(
        self,
        plan: ModulePlan,
        buckets: list[Bucket],
        sources: list[Tensor],
        device: torch.device,
        stream: torch.Stream | None,
    ) -> None:
        # It belongs to one stream, of one device: nothing would order others before the memory goes back to that one.
        self._stream = stream
        self._flats = [torch.empty_like(source, device=device) for source in sources]
        self.parts: list[Tensor] = []
        parameters = set(plan.parameters)
        for bucket, flat in zip(buckets, self._flats, strict=True):
            for i, part in zip(bucket.indices, unflatten(bucket, flat), strict=True):
                self.parts.append(_as_parameter(part, plan.tensors[i]) if i in parameters else part)
        self._reads = _what_to_read(self.parts)
        # Which ones may come to have hooks, or cease to be leaves. No second list of parts: references are counted.
        self._need_gradients = [part.requires_grad for part in self.parts]
        self._state = self._read()
        self._holders = ownership.MemoryHolders(self._flats)
        self._is_at_rest = False  # since it was looked at nobody could change it

    def to_refresh(self) -> list[Tensor]:
        """The flat buffers, to be filled with the values of now."""
        self._is_at_rest = False
        return self._flats

    def can_be_used_again(self, stream: torch.Stream | None) -> bool:
        return stream == self._stream and (self._is_at_rest or (self._is_ours() and self._is_as_it_was()))

    def end_call(self) -> bool:
        """``False`` if the last call has left something on it. The next one asks whether somebody still holds it."""
        if not self._is_at_rest:
            # In this order: what nobody else holds is not changed between the two.
            is_ours = self._is_ours()
            if not self._is_as_it_was():
                return False
            self._is_at_rest = is_ours
        return True

    def _is_ours(self) -> bool:
        """Whether nobody else holds a part of it, or could come to hold one."""
        return ownership.are_in_one_list_only(self.parts) and self._holders.are_the_same()

    def _is_as_it_was(self) -> bool:
        """Whether the parts have not been changed but in value."""
        return self._read() == self._state and not any(map(_ATTRIBUTES, self.parts))

    def _read(self) -> list[list[Any]]:
        found = [list(map(read, self.parts)) for read in self._reads]
        leaves = [*compress(self.parts, self._need_gradients)]
        return [*found, *(list(map(read, leaves)) for read in _STATE_OF_LEAVES)]


_STATE: tuple[Callable[[Tensor], Any], ...] = (
    type,
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("shape", "dtype", "requires_grad", "grad"),
)
_STATE_OF_LEAVES = (attrgetter("is_leaf"), _torch.hooks_of, _torch.hooks_after_accumulation_of)
_ATTRIBUTES = attrgetter("__dict__")


def _what_to_read(parts: list[Tensor]) -> list[Callable[[Tensor], Any]]:
    """What tells whether parts are what they were: ``.data =`` may put in another view of the same memory."""
    reads = [*_STATE]
    if any(part.is_complex() for part in parts):
        reads.append(Tensor.is_conj)
    if not all(map(Tensor.data_ptr, parts)):  # tensors without elements have no address, but their storage has
        reads.append(lambda part: part.untyped_storage().data_ptr())
    return reads


def _as_parameter(copy: Tensor, source: Tensor) -> Tensor:
    """The copy, which nobody else has yet, as a leaf that needs a gradient if its source does."""
    if type(copy) is Tensor:
        copy.__class__ = nn.Parameter
    # Outside of inference mode, where copies are made, what was made inside cannot be told to need one.
    return copy.requires_grad_() if source.requires_grad and not copy.is_inference() else copy
