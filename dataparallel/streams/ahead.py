"""Copies from the host to the slots on side streams, before the chunks are used.

``prefetch`` sends the tensors of a batch before the call that uses them. If there are two or more accelerators,
``scatter_gather`` sends the tensors of a call that can be sent and are not sent yet. It takes the chunks where it would
otherwise copy one after the other. Those two give the tensors and their chunk sizes, and say when a batch ends. Copies
start in pinned host memory and run on one side stream for each device, at the same time as each other and as the
current streams' work. These events order the streams:

- The side stream waits for the current stream before it writes, because a chunk's memory was allocated there and may
  still be in use. Memory allocated on the side stream would need ``record_stream`` on every chunk. It is freed at the
  end of a backward that this room does not see, so memory use would vary from run to run.
- The stream that is current in the call waits for the copies before chunks are handed out. If another stream owns the
  memory, that stream waits too, and ``record_stream`` names the stream that uses the chunks.
- Host memory and chunks that nobody took are held until the host has waited for the copies (`SentBatch.end`).

Pageable memory is copied into pinned memory first: a copy straight from it would stop the host until the device has
done all work that was launched before.
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

__all__ = ["Sender", "SentBatch", "SentTensor", "can_be_sent", "copied_at_once", "take_sent_chunks"]

_waiting: dict[int, list[SentTensor]] = {}
"""Tensors that were sent and not yet taken, by the id of the host tensor.

`SentTensor` keeps that tensor alive, so its id is not reused. Each entry is a list, because a loader may give one
tensor in several batches.
"""


def can_be_sent(tensor: Tensor) -> bool:
    """True if the tensor is on the CPU, of a plain type, strided, not nested, not quantized, and needs no gradient."""
    return (
        tensor.device == CPU
        and type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )


def take_sent_chunks(
    tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int
) -> Sequence[Tensor] | None:
    """The chunks of ``tensor`` that were sent ahead, ready for the current streams; ``None`` if no sent chunks fit.

    Chunks fit if nobody has written to the tensor since it was sent, and if slots, sizes, dimension and isolation are
    those with which it was sent; a whole tensor fits fewer slots too. Chunks made in inference mode fit only inside of
    it. All are handed out once: a second call needs its own, because a module may write to its input.

    Args:
        tensor: the host tensor itself, not a view or a copy of it.
        slots: the slots that get a chunk.
        sizes: the chunks' sizes along ``dim``; ``None`` for the whole tensor on every slot.
        dim: the dimension along which the tensor is cut.
    """
    if not _waiting:
        return None
    candidates = _waiting.get(id(tensor), [])
    for sent in list(candidates):
        if sent.fits(slots, sizes, dim) and _withdraw(sent):
            return sent.hand_out(slots)
    return None


def _withdraw(sent: SentTensor) -> bool:
    """Removes the tensor from the list. Returns ``False`` if another thread has already removed it."""
    candidates = _waiting.get(id(sent.tensor), [])
    try:
        candidates.remove(sent)
    except ValueError:
        return False
    if not candidates:
        # If another thread adds to this list just now, its tensor is not found later, and is copied in the call.
        _waiting.pop(id(sent.tensor), None)
    return True


class SentTensor:
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
        self.copy_events: dict[torch.device, Event] = {}

    def copy_to(self, device: torch.device) -> None:
        """Copies the chunks of one device, on its current stream."""
        for chunk, part in zip(self.chunks, self.pinned, strict=True):
            if chunk.device == device:
                chunk.copy_(part, non_blocking=True)

    def fits(self, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> bool:
        """True if a scatter would cut the tensor into the same chunks now."""
        if sizes is None or self.sizes is None:
            same_cut = sizes is None and self.sizes is None
        else:
            same_cut = list(sizes) == list(self.sizes) and dim == self.dim
        return (
            same_cut
            and self.slots[: len(slots)] == list(slots)
            and self.isolated == are_slots_isolated()
            and self.version == _version(self.tensor)
            # Chunks that were made in inference mode cannot be saved for backward outside of it.
            and (torch.is_inference_mode_enabled() or not self.chunks[0].is_inference())
        )

    def hand_out(self, slots: Sequence[torch.device]) -> list[Tensor]:
        """The chunks of the first ``slots``. Makes the current streams wait for the copies."""
        chunks, self.chunks = self.chunks, []
        for device, here in current_streams(self.owners).items():
            self.copy_events[device].make_wait(here)
            owner = self.owners[device]
            if here != owner:
                # The memory returns to its owner, whichever stream and thread frees it.
                self.copy_events[device].make_wait(owner)
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
    """The sent tensors of one batch. `take_sent_chunks` finds them until `end`."""

    def __init__(self, tensors: list[SentTensor], copy_events: dict[torch.device, Event]) -> None:
        self.tensors, self.copy_events = tensors, copy_events
        for tensor in tensors:
            tensor.copy_events = copy_events
            _waiting.setdefault(id(tensor.tensor), []).append(tensor)

    def end(self) -> None:
        """Waits for the copies, then releases host memory and chunks that nobody took."""
        for tensor in self.tensors:
            _withdraw(tensor)
        for event in self.copy_events.values():
            event.synchronize()
        self.tensors.clear()


class Sender:
    """Sends batches on its own side streams, one for each device in ``slots``, all of which are accelerators."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = list(slots)
        self.streams = {device: torch.Stream(device) for device in dict.fromkeys(slots)}

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[Tensor, Sequence[int] | None]], dim: int) -> SentBatch:
        """Starts to copy tensors for which `can_be_sent` is true, each given with its chunks' sizes along ``dim``.

        ``None`` instead of sizes sends the whole tensor to every slot. `take_sent_chunks` finds the chunks until
        `SentBatch.end`.
        """
        sent = [SentTensor(tensor, self.slots, sizes, dim) for tensor, sizes in tensors]
        copy_events = {}
        try:
            for device in {device: None for tensor in sent for device in tensor.owners}:
                side = self.streams[device]
                Event(torch.accelerator.current_stream(device)).make_wait(side)
                with streams_set({device: side}):
                    for tensor in sent:
                        tensor.copy_to(device)
                    copy_events[device] = Event(side)
        except BaseException:
            # The memory of copies that have started is about to be freed.
            for side in self.streams.values():
                side.synchronize()
            raise
        return SentBatch(sent, copy_events)


@contextmanager
def copied_at_once(
    tensors: Iterable[tuple[Tensor, Sequence[int] | None]], slots: Sequence[torch.device], dim: int
) -> Iterator[None]:
    """Sends tensors to all slots at once; inside the block, `take_sent_chunks` finds their chunks.

    Tensors for which `can_be_sent` is false are left out, and so are tensors with fitting chunks that were sent before.
    With fewer than two accelerators nothing is sent. When the block ends, the copies that it started are complete, and
    the caller may write to their tensors again. Tensors that ``prefetch`` sent may be read until its next batch.

    Args:
        tensors: each with its chunk sizes, or ``None``, as for `Sender.send`.
        slots: the slots that get a chunk.
        dim: the dimension along which tensors are cut.
    """
    new = []
    if len({slot for slot in slots if slot != CPU}) > 1:
        for tensor, sizes in tensors:
            if can_be_sent(tensor) and not any(sent.fits(slots, sizes, dim) for sent in _waiting.get(id(tensor), ())):
                new.append((tensor, sizes))
    batch = _sender(tuple(slots)).send(new, dim) if new else None
    try:
        yield
    finally:
        if batch is not None:
            batch.end()


@lru_cache(maxsize=64)
def _sender(slots: tuple[torch.device, ...]) -> Sender:
    return Sender(slots)


def _version(tensor: Tensor) -> int | None:
    """In-place changes increase it, except writes through ``.data`` and numpy. Inference tensors have none."""
    return None if tensor.is_inference() else _torch.version_of(tensor)


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, dense, so that a copy to a device needs no work of the host."""
    if is_dense(tensor.shape, tensor.stride()) and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
