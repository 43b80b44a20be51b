"""`send`: copies host tensors to the slots on side streams; `take_sent_chunks` hands out the chunks on the slots.

``prefetch`` sends the tensors of a batch before the call that uses them; ``scatter`` sends all tensors of a call before
it takes the first. The host never waits for computation. `send`, `SentTensor` and `HostReads` order the streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.buckets import PLAIN_TYPES, SMALL_BYTES, Bucket, flatten, is_dense, send_packed, travels_flat
from dataparallel.comm.host import can_pin
from dataparallel.comm.kinds import alias, same_kind
from dataparallel.comm.streams.current import Event, current_streams, kept_stream, streams_set
from dataparallel.devices import CPU

_not_taken: dict[int, list[SentTensor]] = {}
"""Sent tensors whose chunks nobody has taken, by the id of the host tensor.

A `SentTensor` keeps the host tensor alive, so no other tensor gets its id. Each entry is a list, because a loader may
give one tensor in several batches.
"""


def can_be_sent(tensor: Tensor) -> bool:
    """True if the tensor is on the CPU, of a plain type, strided, not nested, not quantized, and needs no gradient.

    Inside a transform of ``torch.func`` no tensor is sent: it may be a wrapper of another one. Inside a level of
    forward-mode differentiation it may have a tangent, which these copies would drop.
    """
    return (
        tensor.device == CPU
        and type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (_torch.is_inside_functorch_transform() or _torch.is_in_dual_level())
    )


def take_sent_chunks(
    tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int
) -> Sequence[Tensor] | None:
    """The chunks of the host tensor that were sent ahead, ready for the current streams; ``None`` if none fit.

    ``sizes`` is ``None`` for the whole tensor on every slot. Chunks are handed out once: a second call needs others,
    because a module may write to its input.
    """
    candidates = _not_taken.get(id(tensor), [])
    for sent in list(candidates):
        if sent.fits(slots, sizes, dim) and _withdraw(sent):
            return sent.hand_out(slots)
    return None


def _withdraw(sent: SentTensor) -> bool:
    """Removes ``sent`` from `_not_taken`. Returns ``False`` if another thread has already removed it."""
    candidates = _not_taken.get(id(sent.tensor), [])
    try:
        candidates.remove(sent)
    except ValueError:
        return False
    if not candidates:
        # If another thread adds to this list now, its tensor is lost here, and the call copies the tensor itself.
        _not_taken.pop(id(sent.tensor), None)
    return True


class HostReads(ExitStack):
    """Copies that still read pinned memory of the caller. `close`, or the end of its block, waits for all of them.

    The wait is short: copies wait only for earlier copies. Copies from the library's own pinned memory need no wait,
    because torch's host allocator notes the streams that read it.
    """

    def note(self, memory: list[Tensor], copy_events: Iterable[Event]) -> None:
        """Adds copies that read ``memory``, pinned tensors of the caller."""
        if memory:
            # Held until all waits have been tried: the allocator that pinned it may not know which streams read it.
            self.callback(memory.clear)
            for event in copy_events:
                self.callback(event.synchronize)


class SentTensor:
    """One host tensor and its chunks on the slots, which `send` allocates on the side streams.

    The host first copies pageable memory into pinned memory, and no later copy reads the caller's memory. A copy
    from pageable memory to a device would stop the host until the device has done all earlier work on the stream.
    """

    def __init__(self, tensor: Tensor, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> None:
        self.tensor, self.cut = tensor, _cut(sizes, dim)
        self.slots = list(slots if sizes is None else slots[: len(sizes)])
        self.devices = [*dict.fromkeys(self.slots)] if sizes is None else self.slots  # of the chunks
        self.version = _version(tensor)
        self.callers_memory: list[Tensor] = []
        self.chunks: list[Tensor] = []
        self.copy_events: dict[torch.device, Event] = {}
        self.ordered: set[torch.Stream] = set()  # streams that wait for the copies of the batch

    @property
    def is_small(self) -> bool:
        """True if its chunks travel in buffers with others."""
        return self.cut is not None and self.tensor.nbytes <= SMALL_BYTES and travels_flat(self.tensor)

    def parts(self) -> Sequence[Tensor]:
        """The chunks on the host, or the whole tensor."""
        detached = self.tensor.detach()
        return [detached] if self.cut is None else torch.split_with_sizes(detached, *self.cut)

    def copy(self) -> None:
        """Starts the copies to the slots, on the devices' current streams."""
        parts = self.parts()
        pinned = [_pinned(part) for part in parts]
        self.callers_memory = [part for part, source in zip(parts, pinned, strict=True) if source is part]
        sources = pinned if self.cut is not None else pinned * len(self.devices)
        for source, device in zip(sources, self.devices, strict=True):
            self.chunks.append(_copy_of(source, device))

    def fits(self, slots: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> bool:
        """True if a scatter would cut the tensor into the same chunks now. A whole tensor fits fewer slots too."""
        chunks = self.chunks  # another thread may take them now
        return (
            self.cut == _cut(sizes, dim)
            and bool(chunks)
            and self.slots[: len(slots)] == list(slots)
            and self.version == _version(self.tensor)
            # Chunks that were made in inference mode cannot be saved for backward outside of that mode.
            and (torch.is_inference_mode_enabled() or not chunks[0].is_inference())
        )

    def hand_out(self, slots: Sequence[torch.device]) -> list[Tensor]:
        """The chunks of the first ``slots``. Makes the current streams wait for the copies.

        The last use of a chunk may be in a backward or in the user's code. The library sees neither, so it calls
        ``record_stream`` on the chunk, as ``torch.nn.DataParallel`` does.
        """
        chunks, self.chunks = self.chunks, []
        for device, stream in current_streams(self.devices).items():
            if stream not in self.ordered:
                self.copy_events[device].make_wait(stream)
                self.ordered.add(stream)
            if stream != kept_stream(device, "inputs"):
                # The memory returns to the side stream, whichever stream and thread frees it.
                for chunk, on in zip(chunks, self.devices, strict=True):
                    if on == device:
                        chunk.record_stream(stream)
        if self.cut is None:
            on_device = {chunk.device: chunk for chunk in chunks}
            first_slot = {device: self.slots.index(device) for device in on_device}
            copies = [on_device[device] for device in slots]
            chunks = [copy if first_slot[copy.device] == at else alias(copy, at) for at, copy in enumerate(copies)]
        return [same_kind(chunk, self.tensor) for chunk in chunks[: len(slots)]]


class SentBatch:
    """The sent tensors of one batch. `take_sent_chunks` finds them until `release`."""

    def __init__(self, tensors: list[SentTensor], copy_events: dict[torch.device, Event]) -> None:
        self.tensors, self.copy_events = tensors, copy_events
        ordered: set[torch.Stream] = set()
        for tensor in tensors:
            tensor.copy_events, tensor.ordered = copy_events, ordered
            _not_taken.setdefault(id(tensor.tensor), []).append(tensor)

    def release(self, reads: HostReads) -> None:
        """Releases chunks that nobody took, and adds copies that may still read the caller's memory to ``reads``."""
        for tensor in self.tensors:
            _withdraw(tensor)
        reads.note([part for tensor in self.tensors for part in tensor.callers_memory], self.copy_events.values())
        self.tensors.clear()


def _copy_together(tensors: Sequence[SentTensor], slots: Sequence[torch.device], sizes: Sequence[int]) -> None:
    """Starts the copies of small tensors that are cut alike. None reads the caller's memory, also if it is pinned."""

    def send_pinned(slot: int, bucket: Bucket, parts: Sequence[Tensor]) -> Tensor:
        return _copy_of(flatten(bucket, parts).pin_memory(), slots[slot])

    by_slot = [*zip(*(each.parts() for each in tensors), strict=True)]
    for tensor, chunks in zip(tensors, zip(*send_packed(by_slot, sizes, send_pinned), strict=True), strict=True):
        tensor.chunks += chunks


@torch.no_grad()
def send(
    tensors: Iterable[tuple[Tensor, Sequence[int] | None]],
    slots: Sequence[torch.device],
    dim: int,
) -> SentBatch:
    """Starts to copy tensors to ``slots``, which are accelerators. `can_be_sent` is true for each tensor.

    Each tensor comes with its chunks' sizes along ``dim``, or with ``None``: then the whole tensor goes to every slot.
    `take_sent_chunks` finds the chunks until `SentBatch.release`.

    A side stream waits for no other stream, so a copy starts while the previous step still runs. Memory of that stream
    serves these copies only. If the host is some steps ahead, chunks and pinned memory of all these steps exist.
    """
    tensors = list(tensors)
    used = max((len(slots if sizes is None else sizes) for _, sizes in tensors), default=0)
    # One stream on each device for the whole process, because torch keeps a pool of memory for each stream.
    sides = {device: kept_stream(device, "inputs") for device in dict.fromkeys(slots[:used])}
    try:
        with streams_set(sides):
            sent = [SentTensor(tensor, slots, sizes, dim) for tensor, sizes in tensors]
            together = [each for each in sent if each.is_small and each.cut == sent[0].cut]
            if len(together) > 1:
                assert sent[0].cut is not None
                _copy_together(together, slots, sent[0].cut[0])
            for each in sent:
                if not each.chunks:
                    each.copy()
            copy_events = {device: Event(side) for device, side in sides.items()}
    except BaseException:
        # Copies that have started may read the caller's memory.
        for side in sides.values():
            side.synchronize()
        raise
    return SentBatch(sent, copy_events)


@contextmanager
def copied_at_once(
    tensors: Iterable[tuple[Tensor, Sequence[int] | None]], slots: Sequence[torch.device], dim: int, reads: HostReads
) -> Iterator[None]:
    """Sends all tensors of a call; inside the block, `take_sent_chunks` finds their chunks.

    It leaves out tensors for which `can_be_sent` is false, and tensors that ``prefetch`` has sent in the same chunks:
    those copies may read the caller's memory until the next batch. At the end of the block ``reads`` gets the copies
    that may still read the caller's memory. On CPU slots nothing is sent.
    """
    new = []
    if slots and slots[0] != CPU and _has_side_streams(slots[0].type):
        for tensor, sizes in tensors:
            if can_be_sent(tensor) and not any(sent.fits(slots, sizes, dim) for sent in _not_taken.get(id(tensor), ())):
                new.append((tensor, sizes))
    batch = send(new, slots, dim) if new else None
    try:
        yield
    finally:
        if batch is not None:
            batch.release(reads)


@cache
def _has_side_streams(device_type: str) -> bool:
    """True if the backend has pinned memory and more than one stream. torch has no test for it, so this tries both."""
    try:
        return can_pin(device_type) and torch.Stream(device_type) != torch.Stream(device_type)
    except RuntimeError:
        return False


def _cut(sizes: Sequence[int] | None, dim: int) -> tuple[list[int], int] | None:
    return None if sizes is None else ([*sizes], dim)


def _version(tensor: Tensor) -> int | None:
    """torch's count of in-place writes, without writes through ``.data`` and numpy; ``None`` for inference tensors."""
    return None if tensor.is_inference() else _torch.version_of(tensor)


def _copy_of(pinned: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made on its current stream."""
    return torch.empty_like(pinned, device=device).copy_(pinned, non_blocking=True)


def _pinned(tensor: Tensor) -> Tensor:
    """A dense tensor in pinned memory, which a device copies without the host: the tensor itself, or a copy of it."""
    if is_dense(tensor.shape, tensor.stride()) and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
