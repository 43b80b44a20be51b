"""`ReplicaTensors`: where a form gets the tensors of its replicas. `KeptCopies` is that of the wrapper.

``forms`` has those of `replicate` and `fully_shard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch, comm, ownership
from dataparallel.comm.buckets import Bucket, alias, plan_buckets, unflatten
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.streams.current import current_streams
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.build import make_parameters
from dataparallel.replicas.kept_values import send_buckets
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.replicate import copy_tensors, put


class ReplicaTensors(ABC):
    """Lends tensors to replicas, for one call at a time. A copy of it holds no tensors."""

    @abstractmethod
    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """The plan's tensors for each slot, with their values now.

        ``record``: a graph is recorded. ``arrivals``: parameters may still be on their way, and this launches them.
        """

    def end_call(self) -> None:  # noqa: B027 - some stores do nothing
        """Removes everything that the last call left on kept tensors."""

    def forget_last_call(self) -> None:  # noqa: B027 - some stores do nothing
        """Drops the tensors of the last call, which has failed."""

    def clear(self) -> None:  # noqa: B027 - some stores do nothing
        """Drops everything."""


class KeptCopies(ReplicaTensors):
    """New tensors for a call that records a graph; for other calls copies that are used again.

    It keeps at most one copy for each slot on another device than the first. Each call sends the values again, by one
    transfer for each bucket and device. A copy is used again if nobody else holds a part of it and only its values have
    changed. But ``forward`` may have returned a parameter, stored a view of it, put it into a graph, given it other
    memory (``.data =``) or a gradient. Then the copy is left to its holder and a new one is made. ``ownership`` tells
    who holds what.
    """

    def __init__(self) -> None:
        self._kinds: list[Any] = []
        self._buckets: list[Bucket] = []
        self._singles: list[int] = []
        self._copies: dict[int, _Copy] = {}

    def __reduce__(self) -> tuple[type[KeptCopies], tuple[()]]:
        return KeptCopies, ()

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """See `ReplicaTensors.for_call`."""
        if not record:
            return self.refreshed(plan, slots, cap_bytes, arrivals)
        self.clear()  # training needs the memory
        copies = copy_tensors(plan, slots, True, cap_bytes, arrivals)
        for tensors in copies:
            make_parameters(plan, tensors, ReplicaParameter)
        return copies

    def end_call(self) -> None:
        """Drops copies on which the last call left something: an attribute, a gradient, other memory.

        Drops all of them if reference counts are not trusted.
        """
        trusted = ownership.are_counts_trusted()
        self._copies = {slot: copy for slot, copy in self._copies.items() if copy.end_call() and trusted}

    def clear(self) -> None:
        """Drops all copies."""
        self._copies = {}

    forget_last_call = clear

    # Tensors made in inference mode could not be refreshed outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def refreshed(
        self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, arrivals: Arrivals | None = None
    ) -> list[list[Tensor]]:
        """The plan's tensors for each slot, with their values now. Parameters are ``nn.Parameter``.

        Slots on one device share the memory of parameters; on the first slot's device it is the source's. Each
        slot has its own buffers; slot 0 has the source's. ``arrivals``: parameters may still be on their way.
        """
        parameters = set(plan.parameters)
        buffers = [i for i in range(len(plan.tensors)) if i not in parameters]
        self._plan_buckets(plan, buffers, cap_bytes)
        copies = [list(plan.tensors) for _ in slots]
        # For each slot the slot whose memory its parameters share.
        homes = [slots.index(device) for device in slots]
        away = [slot for slot, home in enumerate(homes) if slot == home and slot > 0]
        if away:
            self._send(plan, slots, away, copies, arrivals)
        for slot, home in enumerate(homes):
            if slot in away:
                continue
            for i in plan.parameters:
                copies[slot][i] = _as_parameter(alias(copies[home][i], slot), plan.tensors[i])
            if slot != home:
                here = [slots[slot]] * 2
                own = comm.broadcast_coalesced([copies[home][i] for i in buffers], here, own_storage=True)[1]
                put([copies[slot]], buffers, [own])
        return copies

    def _plan_buckets(self, plan: ModulePlan, buffers: list[int], cap_bytes: int) -> None:
        """Plans new buckets if the kind of a tensor has changed: ``.data =`` may change everything but its class."""
        kinds: list[Any] = [cap_bytes, plan.parameters, *map(_kind, plan.tensors)]
        if kinds != self._kinds:
            self._copies = {}
            # Buffers have buckets of their own, because their copies may not be late. These come first.
            of_buffers, of_parameters = (
                plan_buckets(plan.tensors, cap_bytes, candidates=group) for group in (buffers, sorted(plan.parameters))
            )
            self._buckets, self._singles = of_buffers[0] + of_parameters[0], of_buffers[1] + of_parameters[1]
            self._kinds = kinds

    def _send(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        away: list[int],
        copies: list[list[Tensor]],
        arrivals: Arrivals | None,
    ) -> None:
        targets: list[list[Tensor]] = [[] for _ in self._buckets]
        positions = [i for bucket in self._buckets for i in bucket.indices]
        streams = current_streams(slots)
        for slot in away:
            device = slots[slot]
            kept, stream = self._copies.get(slot), streams.get(device)
            if kept is None or not kept.can_be_used_again(stream):
                # First, so that the new copy may get its memory.
                self._copies.pop(slot, None)
                kept = None
                kept = self._copies[slot] = _Copy(plan, self._buckets, device, stream)
            for of_bucket, flat in zip(targets, kept.to_refresh(), strict=True):
                of_bucket.append(flat)
            put([copies[slot]], positions, [kept.parts])
        parameters = set(plan.parameters)
        may_be_late = () if arrivals is None else parameters
        late = send_buckets(zip(self._buckets, targets, strict=True), plan.tensors, may_be_late)
        if arrivals is not None:
            arrivals.launch(late, plan.read_directly)
        for i in self._singles:
            source = plan.tensors[i]
            # The first result is the source's tensor. Isolated slots get copies on its device.
            (_, *sent) = comm.broadcast(source, [slots[0], *(slots[slot] for slot in away)])
            for slot, single in zip(away, sent, strict=True):
                copies[slot][i] = _as_parameter(single, source) if i in parameters else single


def _kind(tensor: Tensor) -> Any:
    """The properties of a tensor on which `plan_buckets` and the copies' ``requires_grad`` depend."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    bits = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), bool(tensor.__dict__)
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits


class _Copy:
    """The copy on one device: a flat buffer for each bucket, and the tensors in the buffers."""

    def __init__(
        self, plan: ModulePlan, buckets: list[Bucket], device: torch.device, stream: torch.Stream | None
    ) -> None:
        # The memory belongs to this stream. Nothing orders another stream before the memory is freed.
        self._stream = stream
        self._flats = [
            torch.empty(bucket.numel, dtype=plan.tensors[bucket.indices[0]].dtype, device=device) for bucket in buckets
        ]
        self.parts: list[Tensor] = []
        parameters = set(plan.parameters)
        for bucket, flat in zip(buckets, self._flats, strict=True):
            for i, part in zip(bucket.indices, unflatten(bucket, flat), strict=True):
                self.parts.append(_as_parameter(part, plan.tensors[i]) if i in parameters else part)
        self._reads = _state_readers(self.parts)
        # These may get hooks or stop being leaves. Flags, and no second list of parts: references are counted.
        self._need_gradients = [part.requires_grad for part in self.parts]
        self._state = self._read()
        self._holders = ownership.MemoryHolders(self._flats)
        self._is_known_free = False  # it was checked at the end of the call, and nobody could change it since

    def to_refresh(self) -> list[Tensor]:
        """The flat buffers, to be filled with the current values for a call."""
        self._is_known_free = False
        return self._flats

    def can_be_used_again(self, stream: torch.Stream | None) -> bool:
        """True if a call on ``stream`` may use it."""
        return stream == self._stream and (self._is_known_free or (self._is_free() and self._is_unchanged()))

    def end_call(self) -> bool:
        """Returns ``False`` if the last call left something on it. Somebody may still hold a part of it."""
        if not self._is_known_free:
            # In this order: if nobody else holds a part, nobody changes it between the two questions.
            is_free = self._is_free()
            if not self._is_unchanged():
                return False
            self._is_known_free = is_free
        return True

    def _is_free(self) -> bool:
        """True if nobody else holds a part of it, or can get at one through a weak reference."""
        return ownership.are_in_one_list_only(self.parts) and self._holders.are_unchanged()

    def _is_unchanged(self) -> bool:
        """True if at most the values of the parts have changed."""
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


def _state_readers(parts: list[Tensor]) -> list[Callable[[Tensor], Any]]:
    """Functions that read the state of a part. ``.data =`` may give it another view of the same memory."""
    reads = [*_STATE]
    if any(part.is_complex() for part in parts):
        reads.append(Tensor.is_conj)
    if not all(map(Tensor.data_ptr, parts)):  # tensors without elements have no address, but their storage has
        reads.append(lambda part: part.untyped_storage().data_ptr())
    return reads


def _as_parameter(copy: Tensor, source: Tensor) -> Tensor:
    """Makes a new copy a parameter and a leaf, which requires a gradient if its source does."""
    if type(copy) is Tensor:
        copy.__class__ = nn.Parameter
    # Copies are made outside of inference mode, where an inference tensor cannot be set to require one.
    return copy.requires_grad_() if source.requires_grad and not copy.is_inference() else copy
