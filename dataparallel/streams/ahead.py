"""Chunks that are copied from the host to the slots on side streams, ahead of their use: copies, and their order.

``prefetch`` has the tensors of a batch sent before the call that uses them, ``scatter_gather`` those of a call all at
once; it takes the chunks where it would copy one after the other. Which tensors, how they are cut, and when a batch is
done with is theirs to say. Copies go from pinned host memory over one side stream for each device, so that they run
beside each other and while the current streams compute. What orders them:

- The side stream waits for the current stream before it writes: a chunk's memory is the current stream's, and what was
  freed there may still be in use. Memory of the side stream's own would need ``record_stream`` on every chunk, since
  it is freed at the end of a backward that this room does not see, and memory use would vary from run to run.
- The stream that is current in the call waits for the copies before chunks are handed out. If it is not the stream
  that the memory belongs to, that one waits too, and the chunks are recorded on the one that uses them.
- Host memory and chunks that nobody took are held until the host has waited for the copies (`SentBatch.end`).

Pageable memory is copied into pinned memory first: a copy straight from it would hold up the host until the device has
done all that is before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm import copies
from dataparallel.comm.buckets import PLAIN_TYPES, is_dense
from dataparallel.comm.copies import alias
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.devices import CPU
from dataparallel.streams.current import Event, current_streams, streams_set

__all__ = ["CopiedTensor", "Sender", "SentBatch", "can_be_sent", "copied_at_once", "take"]

_waiting: dict[int, list[CopiedTensor]] = {}
"""What has been sent and not been taken, by the id of the host tensor, which `CopiedTensor` holds: the id stays taken.

A list, because a loader may give one tensor in several batches.
"""


def can_be_sent(tensor: Tensor) -> bool:
    """Whether a plain copy carries the tensor, host memory without a graph, to a device."""
    return (
        tensor.device == CPU
        and type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )


def take(
    tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int
) -> Sequence[Tensor] | None:
    """The chunks of ``tensor`` that were sent ahead, ready for the current streams; ``None`` if none fit.

    They are handed out once: a second call has to have its own, since a module may write to its input. A tensor that
    was written to since, another list of slots and other sizes do not fit.

    Args:
        tensor: the host tensor itself; results of operators are others.
        slots: the slots that get a chunk.
        sizes: their sizes along ``dim``; ``None`` for the whole tensor on every slot.
    """
    if not _waiting:
        return None
    candidates = _waiting.get(id(tensor), [])
    for copied in list(candidates):
        if copied.fits(slots, sizes, dim) and _withdrawn(copied):
            return copied.hand_out(slots)
    return None


def _withdrawn(copied: CopiedTensor) -> bool:
    """Takes it off the list; whether it was there still: another thread may have been faster."""
    candidates = _waiting.get(id(copied.tensor), [])
    try:
        candidates.remove(copied)
    except ValueError:
        return False
    if not candidates:
        # What another thread puts into this list just now is not found any more, and copied in the call.
        _waiting.pop(id(copied.tensor), None)
    return True


class CopiedTensor:
    """One host tensor and its chunks on the slots."""

    def __init__(self, tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> None:
        self.tensor, self.sizes, self.dim = tensor, sizes, dim
        self.slots = list(slots if sizes is None else slots[: len(sizes)])
        self.isolated = are_slots_isolated()
        self.version = _version(tensor)
        detached = tensor.detach()
        if sizes is None:
            devices = self.slots if self.isolated else list(dict.fromkeys(self.slots))
            self.pinned = [_pinned(detached)] * len(devices)
        else:
            devices = self.slots
            self.pinned = [_pinned(part) for part in detached.split(list(sizes), dim)]
        self.chunks = [torch.empty_like(part, device=to) for part, to in zip(self.pinned, devices, strict=True)]
        self.owners = current_streams(devices)
        self.copied: dict[torch.device, Event] = {}

    def copy_to(self, device: torch.device) -> None:
        """Copies the chunks of one device, on its current stream."""
        for chunk, part in zip(self.chunks, self.pinned, strict=True):
            if chunk.device == device:
                chunk.copy_(part, non_blocking=True)

    def fits(self, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> bool:
        """Whether these chunks are what a scatter would make of the tensor now."""
        if sizes is None or self.sizes is None:
            same_cut = sizes is None and self.sizes is None
        else:
            same_cut = list(sizes) == list(self.sizes) and dim == self.dim
        return (
            same_cut
            and self.slots[: len(slots)] == list(slots)
            and self.isolated == are_slots_isolated()
            and self.version == _version(self.tensor)
            # Outside inference mode chunks that were made inside could not be saved for backward.
            and (torch.is_inference_mode_enabled() or not self.chunks[0].is_inference())
        )

    def hand_out(self, slots: Sequence[torch.device]) -> list[Tensor]:
        """The chunks of the first ``slots``, after which the current streams have waited for the copies."""
        chunks, self.chunks = self.chunks, []
        for device, here in current_streams(self.owners).items():
            self.copied[device].hold_back(here)
            owner = self.owners[device]
            if here != owner:
                # It gets the memory back, from whichever stream and thread.
                self.copied[device].hold_back(owner)
                for chunk in chunks:
                    if chunk.device == device:
                        chunk.record_stream(here)
        if self.sizes is None and not self.isolated:
            on_device = {chunk.device: chunk for chunk in chunks}
            first = {device: self.slots.index(device) for device in on_device}
            whole = [on_device[device] for device in slots]
            chunks = [copy if first[copy.device] == slot else alias(copy, slot) for slot, copy in enumerate(whole)]
        return [copies.same_kind(chunk, self.tensor) for chunk in chunks[: len(slots)]]


class SentBatch:
    """The copied tensors of one batch, from their copies on until `end`."""

    def __init__(self, tensors: list[CopiedTensor], copied: dict[torch.device, Event]) -> None:
        self.tensors, self.copied = tensors, copied
        for tensor in tensors:
            tensor.copied = copied
            _waiting.setdefault(id(tensor.tensor), []).append(tensor)

    def end(self) -> None:
        """Waits for the copies, then lets go of host memory, and of chunks that nobody took."""
        for tensor in self.tensors:
            _withdrawn(tensor)
        for event in self.copied.values():
            event.synchronize()
        self.tensors.clear()


class Sender:
    """Sends batches over streams of its own, one for each accelerator among ``slots``."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = list(slots)
        self.streams = {device: torch.Stream(device) for device in dict.fromkeys(slots)}

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[Tensor, Sequence[int] | None]], dim: int) -> SentBatch:
        """Starts to copy tensors that `can_be_sent`, each given with the sizes of its chunks along ``dim``.

        No sizes: the whole tensor to every slot. `take` then finds the chunks until `SentBatch.end`.
        """
        sent = [CopiedTensor(tensor, self.slots, sizes, dim) for tensor, sizes in tensors]
        copied = {}
        try:
            for device in {device: None for tensor in sent for device in tensor.owners}:
                side = self.streams[device]
                Event(torch.accelerator.current_stream(device)).hold_back(side)
                with streams_set({device: side}):
                    for tensor in sent:
                        tensor.copy_to(device)
                    copied[device] = Event(side)
        except BaseException:
            # What is copied already is about to be freed.
            for side in self.streams.values():
                side.synchronize()
            raise
        return SentBatch(sent, copied)


@contextmanager
def copied_at_once(
    tensors: Iterable[tuple[Tensor, Sequence[int] | None]], slots: Sequence[torch.device], dim: int
) -> Iterator[None]:
    """Inside, `take` finds the chunks of those tensors that `can_be_sent`, on their way to all slots at once.

    When it ends they have arrived, so that the batch is the caller's again. With less than two accelerators nothing is
    sent.

    Args:
        tensors: with their chunk sizes, or ``None``, as for `Sender.send`.
        slots: those that get a chunk.
        dim: along which tensors are cut.
    """
    if len({slot for slot in slots if slot != CPU}) < 2:
        yield
        return
    fresh = [
        (tensor, sizes)
        for tensor, sizes in tensors
        if can_be_sent(tensor) and not any(sent.fits(slots, sizes, dim) for sent in _waiting.get(id(tensor), ()))
    ]
    if not fresh:
        yield
        return
    sent = None
    try:
        sent = _sender(tuple(slots)).send(fresh, dim)
        yield
    finally:
        if sent is not None:
            sent.end()


@lru_cache(maxsize=64)
def _sender(slots: tuple[torch.device, ...]) -> Sender:
    return Sender(slots)


def _version(tensor: Tensor) -> int | None:
    """Moves with every change in place, but for writes through ``.data`` and numpy; inference tensors have none."""
    return None if tensor.is_inference() else _torch.version_of(tensor)


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, as one run that a device can be sent without the host's help."""
    if is_dense(tensor.shape, tensor.stride()) and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
