"""`ReplicaTensors` lends a form the tensors of its replicas. `KeptCopies` is the store of ``DataParallel``.

The stores of `replicate` and `fully_shard` are in ``forms``.
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
from dataparallel.comm.buckets import Bucket, alias, has_strides, plan_buckets, unflatten
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.streams.current import current_streams
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.build import make_parameters
from dataparallel.replicas.kept_values import send_buckets
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.replicate import copy_tensors, put


class ReplicaTensors(ABC):
    """Lends tensors to the replicas of one call at a time. Copying or unpickling a store gives an empty one."""

    @abstractmethod
    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """Returns for each slot a list of the plan's tensors, with the source's current values.

        ``record``: the call records a graph. ``arrivals``: parameters may arrive after this returns. It launches them.
        """

    def end_call(self) -> None:  # noqa: B027 - some stores do nothing
        """Removes what the last call left on kept tensors."""

    def forget_last_call(self) -> None:  # noqa: B027 - some stores do nothing
        """Drops the tensors of the last call, which has failed."""

    def clear(self) -> None:  # noqa: B027 - some stores do nothing
        """Drops everything."""


class KeptCopies(ReplicaTensors):
    """Makes new tensors for a call that records a graph. Other calls use kept copies again.

    It keeps at most one copy of the source for each device besides the first slot's. Each call sends all values again,
    in one transfer for each bucket and device. A copy is used again if no other code holds a tensor of it, and only
    values have changed. But ``forward`` may have returned a parameter, stored a view of it, put it into a graph, given
    it other memory (``.data =``) or a gradient. Then the copy is left to its holder and a new one is made.
    ``ownership`` finds such holders.
    """

    def __init__(self) -> None:
        self._kinds: list[Any] = []
        self._buckets: list[Bucket] = []
        self._singles: list[int] = []
        self._copies: dict[int, _DeviceCopy] = {}  # by the first slot on the device

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
        """Drops each copy on which the last call left an attribute, a gradient or other memory.

        If reference counts are not trusted, drops all copies.
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
        """Returns for each slot the plan's tensors, with the source's current values. Parameters are ``nn.Parameter``.

        Slots on one device share the memory of parameters. On the first slot's device it is the source's memory. Each
        slot has its own buffers; slot 0 has the source's. ``arrivals``: parameters may arrive after this returns.
        """
        parameters = set(plan.parameters)
        buffers = [i for i in range(len(plan.tensors)) if i not in parameters]
        self._plan_buckets(plan, buffers, cap_bytes)
        copies = [list(plan.tensors) for _ in slots]
        first_slots = [slots.index(device) for device in slots]  # for each slot the first slot on its device
        receivers = [slot for slot, first in enumerate(first_slots) if slot == first and slot > 0]
        if receivers:
            self._send(plan, parameters, slots, receivers, copies, arrivals)
        for slot, first in enumerate(first_slots):
            if slot in receivers:
                continue
            for i in plan.parameters:
                copies[slot][i] = _as_parameter(alias(copies[first][i], slot), plan.tensors[i])
            if slot != first:
                device_twice = [slots[slot]] * 2
                sources = [copies[first][i] for i in buffers]
                put([copies[slot]], buffers, [comm.broadcast_coalesced(sources, device_twice, own_storage=True)[1]])
        return copies

    def _plan_buckets(self, plan: ModulePlan, buffers: list[int], cap_bytes: int) -> None:
        """Plans new buckets if the kind of a tensor has changed: ``.data =`` may change everything but its class."""
        kinds: list[Any] = [cap_bytes, plan.parameters, *map(_kind, plan.tensors)]
        if kinds != self._kinds:
            self._copies = {}
            # Buffers have buckets of their own, because copies of buffers may not be late. These buckets come first.
            (buckets, singles), (parameter_buckets, parameter_singles) = (
                plan_buckets(plan.tensors, cap_bytes, candidates=group) for group in (buffers, sorted(plan.parameters))
            )
            self._buckets, self._singles = buckets + parameter_buckets, singles + parameter_singles
            self._kinds = kinds

    def _send(
        self,
        plan: ModulePlan,
        parameters: set[int],
        slots: list[torch.device],
        receivers: list[int],
        copies: list[list[Tensor]],
        arrivals: Arrivals | None,
    ) -> None:
        targets: list[list[Tensor]] = [[] for _ in self._buckets]  # for each bucket a flat buffer for each receiver
        positions = [i for bucket in self._buckets for i in bucket.indices]
        streams = current_streams(slots)
        for slot in receivers:
            device = slots[slot]
            kept, stream = self._copies.get(slot), streams.get(device)
            if kept is None or not kept.can_be_used_again(stream):
                # The old copy is dropped first, so that the new copy may get its memory.
                self._copies.pop(slot, None)
                kept = None
                kept = self._copies[slot] = _DeviceCopy(plan, self._buckets, device, stream)
            for bucket_targets, flat in zip(targets, kept.begin_call(), strict=True):
                bucket_targets.append(flat)
            put([copies[slot]], positions, [kept.tensors])
        may_be_late = () if arrivals is None else parameters
        late = send_buckets(zip(self._buckets, targets, strict=True), plan.tensors, may_be_late)
        if arrivals is not None:
            arrivals.launch(late, plan.read_directly)
        for i in self._singles:
            source = plan.tensors[i]
            # The first result is the source's tensor. Isolated slots get copies on its device.
            (_, *sent) = comm.broadcast(source, [slots[0], *(slots[slot] for slot in receivers)])
            for slot, single in zip(receivers, sent, strict=True):
                copies[slot][i] = _as_parameter(single, source) if i in parameters else single


def _kind(tensor: Tensor) -> Any:
    """Returns the properties of a tensor on which `plan_buckets` and the copies' ``requires_grad`` depend."""
    if not has_strides(tensor):
        return tensor.layout
    bits = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), bool(tensor.__dict__)
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits


class _DeviceCopy:
    """A copy of the source on one device: a flat buffer for each bucket, and the tensors in the buffers."""

    def __init__(
        self, plan: ModulePlan, buckets: list[Bucket], device: torch.device, stream: torch.Stream | None
    ) -> None:
        # The memory belongs to this stream. No other stream may use it: freeing it waits for this stream only.
        self._stream = stream
        self._flats = [
            torch.empty(bucket.numel, dtype=plan.tensors[bucket.indices[0]].dtype, device=device) for bucket in buckets
        ]
        self.tensors: list[Tensor] = []
        parameters = set(plan.parameters)
        for bucket, flat in zip(buckets, self._flats, strict=True):
            for i, tensor in zip(bucket.indices, unflatten(bucket, flat), strict=True):
                self.tensors.append(_as_parameter(tensor, plan.tensors[i]) if i in parameters else tensor)
        self._reads = _state_readers(self.tensors)
        # ``forward`` can add hooks to these, or make them no leaves. Flags, because a second list would add references.
        self._requires_grad = [tensor.requires_grad for tensor in self.tensors]
        self._state = self._read_state()
        self._holders = ownership.MemoryHolders(self._flats)
        self._is_known_free = False  # `end_call` has checked it, and no call has used the copy since

    def begin_call(self) -> list[Tensor]:
        """Returns the flat buffers, which the caller fills with current values."""
        self._is_known_free = False
        return self._flats

    def can_be_used_again(self, stream: torch.Stream | None) -> bool:
        """True if a call on ``stream`` may use the copy."""
        return stream == self._stream and (self._is_known_free or (self._is_free() and self._is_unchanged()))

    def end_call(self) -> bool:
        """Returns ``False`` if the last call changed more than values. Does not check if other code holds a tensor."""
        if not self._is_known_free:
            # In this order: while no other code holds a tensor, none can change between the two checks.
            is_free = self._is_free()
            if not self._is_unchanged():
                return False
            self._is_known_free = is_free
        return True

    def _is_free(self) -> bool:
        """True if no other code holds a tensor or its memory, or can get at one through a weak reference."""
        return ownership.are_in_one_list_only(self.tensors) and self._holders.are_unchanged()

    def _is_unchanged(self) -> bool:
        """True if nothing but values has changed."""
        return self._read_state() == self._state and not any(map(_ATTRIBUTES, self.tensors))

    def _read_state(self) -> list[list[Any]]:
        states = [list(map(read, self.tensors)) for read in self._reads]
        leaves = [*compress(self.tensors, self._requires_grad)]
        return [*states, *(list(map(read, leaves)) for read in _STATE_OF_LEAVES)]


_STATE: tuple[Callable[[Tensor], Any], ...] = (
    type,
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("shape", "dtype", "requires_grad", "grad"),
)
_STATE_OF_LEAVES = (attrgetter("is_leaf"), _torch.hooks_of, _torch.hooks_after_accumulation_of)
_ATTRIBUTES = attrgetter("__dict__")


def _state_readers(tensors: list[Tensor]) -> list[Callable[[Tensor], Any]]:
    """Returns functions that read the state of a tensor. ``.data =`` may give it another view of the same memory."""
    reads = [*_STATE]
    if any(tensor.is_complex() for tensor in tensors):
        reads.append(Tensor.is_conj)
    if not all(map(Tensor.data_ptr, tensors)):  # tensors without elements have no address, but their storage has
        reads.append(lambda tensor: tensor.untyped_storage().data_ptr())
    return reads


def _as_parameter(copy: Tensor, source: Tensor) -> Tensor:
    """Makes a new copy a parameter. It is a leaf, and requires a gradient if its source does."""
    if type(copy) is Tensor:
        copy.__class__ = nn.Parameter
    # Copies are made outside of inference mode, where an inference tensor cannot be set to require one.
    return copy.requires_grad_() if source.requires_grad and not copy.is_inference() else copy
