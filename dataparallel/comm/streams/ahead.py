"""Copies from the host to the slots on side streams, before the chunks are used.

``prefetch`` sends the tensors of a batch before the call that uses them, ``scatter`` those of a call, at once.
The host waits for nothing that is computed. `send`, `SentTensor` and `HostReads` say what orders the streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from dataparallel import _torch
from dataparallel.comm.buckets import PLAIN_TYPES, alias, is_dense, same_kind
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, current_streams, kept_stream, streams_set
from dataparallel.devices import CPU
from dataparallel.profiling import note_copy

_waiting: dict[int, list[SentTensor]] = {}
"""Tensors that were sent and not yet taken, by the id of the host tensor.

`SentTensor` keeps that tensor alive, so its id is not reused. Each entry is a list, because a loader may give one
tensor in several batches.
"""


def can_be_sent(tensor: Tensor) -> bool:
    """True if the tensor is on the CPU, of a plain type, strided, not nested, not quantized, and needs no gradient.

    Nor a tangent, as in forward-mode differentiation: copies here are in no graph. Inside a transform of ``torch.func``
    a tensor may be more than it seems.
    """
    return (
        tensor.device == CPU
        and type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not _torch.is_inside_functorch_transform()
        and unpack_dual(tensor).tangent is None
    )


def take_sent_chunks(
    tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int
) -> Sequence[Tensor] | None:
    """The chunks of ``tensor`` that were sent ahead, ready for the current streams; ``None`` if no sent chunks fit.

    ``tensor`` is the host tensor itself; ``sizes`` is ``None`` for the whole tensor on every slot. Chunks are handed
    out once: a second call needs its own, because a module may write to its input.
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


class HostReads:
    """Copies that still read pinned memory of the caller. As a context, it waits for them at the end of the block.

    They depend on nothing but earlier copies. Copies from the library's own pinned memory need no wait: torch's host
    allocator notes the streams that read it.
    """

    def __init__(self) -> None:
        # The memory is held too: it may have been pinned by somebody whose allocator knows of no copies.
        self._noted: list[tuple[list[Tensor], list[Event]]] = []

    def note(self, memory: list[Tensor], copy_events: Iterable[Event]) -> None:
        """Adds copies that read ``memory``, pinned tensors of the caller."""
        if memory:
            self._noted.append((memory, list(copy_events)))

    def wait_for_copies(self) -> None:
        """Makes the host wait. Then nothing reads the memory."""
        with ExitStack() as waits:  # it waits for all of them, even if one wait fails
            for _, copy_events in self._noted:
                for event in copy_events:
                    waits.callback(event.synchronize)
        self._noted.clear()

    def __enter__(self) -> HostReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait_for_copies()


class SentTensor:
    """One host tensor and its chunks on the slots. Chunks are allocated on the streams that are current.

    Pageable memory is first copied into pinned memory, by the host, and is the caller's at once: a copy straight from
    it would stop the host until the device has done all that was launched before.
    """

    def __init__(self, tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> None:
        self.tensor, self.sizes, self.dim = tensor, sizes, dim
        self.slots = list(slots if sizes is None else slots[: len(sizes)])
        self.version = _version(tensor)
        detached = tensor.detach()
        if sizes is None:
            devices = list(dict.fromkeys(self.slots))
            parts = [detached]
        else:
            devices = self.slots
            parts = list(detached.split(list(sizes), dim))
        pinned = [_pinned(part) for part in parts]
        self.callers_memory = [part for part, own in zip(parts, pinned, strict=True) if own is part]
        self.pinned = pinned if sizes is not None else pinned * len(devices)
        self.chunks = [torch.empty_like(part, device=to) for part, to in zip(self.pinned, devices, strict=True)]
        self.copy_events: dict[torch.device, Event] = {}

    def copy_to(self, device: torch.device) -> None:
        """Copies the chunks of one device, on its current stream."""
        for chunk, part in zip(self.chunks, self.pinned, strict=True):
            if chunk.device == device:
                note_copy("direct", part, device)
                chunk.copy_(part, non_blocking=True)

    def fits(self, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> bool:
        """True if a scatter would cut the tensor into the same chunks now. A whole tensor fits fewer slots too."""
        if sizes is None or self.sizes is None:
            same_cut = sizes is None and self.sizes is None
        else:
            same_cut = list(sizes) == list(self.sizes) and dim == self.dim
        return (
            same_cut
            and self.slots[: len(slots)] == list(slots)
            and self.version == _version(self.tensor)
            # Chunks that were made in inference mode cannot be saved for backward outside of it.
            and (torch.is_inference_mode_enabled() or not self.chunks[0].is_inference())
        )

    def hand_out(self, slots: Sequence[torch.device]) -> list[Tensor]:
        """The chunks of the first ``slots``. Makes the current streams wait for the copies.

        The last use of a chunk is in a backward or where the user drops it, which nothing here sees. So
        ``record_stream`` is called on it, as in ``torch.nn.DataParallel``.
        """
        chunks, self.chunks = self.chunks, []
        for device, here in current_streams(chunk.device for chunk in chunks).items():
            self.copy_events[device].make_wait(here)
            if here != kept_stream(device, "inputs"):
                # The memory returns to the side stream, whichever stream and thread frees it.
                for chunk in chunks:
                    if chunk.device == device:
                        chunk.record_stream(here)
        if self.sizes is None:
            on_device = {chunk.device: chunk for chunk in chunks}
            first = {device: self.slots.index(device) for device in on_device}
            whole = [on_device[device] for device in slots]
            chunks = [copy if first[copy.device] == slot else alias(copy, slot) for slot, copy in enumerate(whole)]
        return [same_kind(chunk, self.tensor) for chunk in chunks[: len(slots)]]


class SentBatch:
    """The sent tensors of one batch. `take_sent_chunks` finds them until `release`."""

    def __init__(self, tensors: list[SentTensor], copy_events: dict[torch.device, Event]) -> None:
        self.tensors, self.copy_events = tensors, copy_events
        for tensor in tensors:
            tensor.copy_events = copy_events
            _waiting.setdefault(id(tensor.tensor), []).append(tensor)

    def release(self, reads: HostReads) -> None:
        """Releases chunks that nobody took, and notes in ``reads`` what copies may still read."""
        for tensor in self.tensors:
            _withdraw(tensor)
            reads.note(tensor.callers_memory, self.copy_events.values())
        self.tensors.clear()


@torch.no_grad()
def send(
    tensors: Iterable[tuple[Tensor, Sequence[int] | None]],
    slots: Sequence[torch.device],
    dim: int,
    to_some: Iterable[tuple[Tensor, Sequence[int]]] = (),
) -> SentBatch:
    """Starts to copy tensors for which `can_be_sent` is true, each given with its chunks' sizes along ``dim``.

    ``None`` instead of sizes sends the whole tensor to every slot, all of which are accelerators. ``to_some`` has
    tensors that go whole to some slots, with the numbers of these. `take_sent_chunks` finds the chunks until
    `SentBatch.release`.

    A side stream waits for no other stream, so a copy starts while the step before still runs. Its memory serves copies
    only. A host that is some steps ahead takes chunks, and pinned memory, of that many steps: both stay with torch's
    allocators.
    """
    tensors = list(tensors)
    some = [(tensor, [slots[slot] for slot in numbers]) for tensor, numbers in to_some]
    used = max((len(slots if sizes is None else sizes) for _, sizes in tensors), default=0)
    devices = chain(slots[:used], *(theirs for _, theirs in some))
    # One stream of a device for the whole process, because each stream has a pool of memory of its own.
    sides = {device: kept_stream(device, "inputs") for device in dict.fromkeys(devices)}
    copy_events = {}
    try:
        with streams_set(sides):
            sent = [SentTensor(tensor, slots, sizes, dim) for tensor, sizes in tensors]
            sent += [SentTensor(tensor, theirs, None, dim) for tensor, theirs in some]
            for device, side in sides.items():
                for tensor in sent:
                    tensor.copy_to(device)
                copy_events[device] = Event(side)
    except BaseException:
        # Copies that have started may read memory of the caller.
        for side in sides.values():
            side.synchronize()
        raise
    return SentBatch(sent, copy_events)


@contextmanager
def copied_at_once(
    tensors: Iterable[tuple[Tensor, Sequence[int] | None]], slots: Sequence[torch.device], dim: int, reads: HostReads
) -> Iterator[None]:
    """Sends tensors to all slots at once; inside the block, `take_sent_chunks` finds their chunks.

    Tensors for which `can_be_sent` is false are left out, and so are tensors with fitting chunks that were sent before:
    those that ``prefetch`` sent may be read until its next batch. ``reads`` gets the copies that may read the caller's
    memory when the block ends. On CPU slots nothing is sent.
    """
    new = []
    if slots and slots[0] != CPU and _has_side_streams(slots[0].type):
        for tensor, sizes in tensors:
            if can_be_sent(tensor) and not any(sent.fits(slots, sizes, dim) for sent in _waiting.get(id(tensor), ())):
                new.append((tensor, sizes))
    batch = send(new, slots, dim) if new else None
    try:
        yield
    finally:
        if batch is not None:
            batch.release(reads)


@cache
def _has_side_streams(device_type: str) -> bool:
    """True if the backend has pinned memory and more than one stream. torch has no question for it, so this tries."""
    try:
        return can_pin(device_type) and torch.Stream(device_type) != torch.Stream(device_type)
    except RuntimeError:
        return False


def _version(tensor: Tensor) -> int | None:
    """In-place changes increase it, except writes through ``.data`` and numpy. Inference tensors have none."""
    return None if tensor.is_inference() else _torch.version_of(tensor)


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, dense, so that a copy to a device needs no work of the host."""
    if is_dense(tensor.shape, tensor.stride()) and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
