"""Side streams on which gradients travel while backward still computes.

A sum waits for the slowest slot. On the computing streams it would stop every device until then, once for each bucket.
Of the computing streams only the root's waits, and only when the sum is used. ``autograd.bucket_nodes`` flattens
gradients on the streams that compute them, and adds on side streams. This room knows neither buckets nor routes. These
events order the streams:

- When a slot has a bucket's gradients, its thread of the engine records an event on the stream that made them
  (`Made`). A side stream waits for this event, not for what the slot has launched since.
- The sum is written to the root's own flat buffer. If there is none, the sum's memory is allocated on the root's
  computing stream when the sum is launched. Work that used that memory before may still be queued there, so the root's
  side stream waits for that stream.
- The root's computing stream waits for a sum when it has computed its own part of the backward
  (`bucket_nodes.FromSource`), or when somebody drops the sum unused. Before that it waits for no other slot.

Flat buffers are memory of the streams that made them, and side streams read them. So they are freed by these rules:

- The sum is held by its user.
- Flat buffers on other devices are held until their computing stream has waited for the side stream: when the second
  bucket after them travels, because the wait costs nothing by then, or when backward ends.
- ``record_stream`` names the side stream for flat buffers of further slots on the root's device, because the root's
  computing stream must not wait for the sum, and for those that another stream than the computing one has made.
  ``record_stream`` everywhere would hold the buffers of a whole step: such memory is free only when the host looks
  again, and by then the host may have launched all of it.

Copies of parameters have side streams of their own: see ``comm.streams.arrivals``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm.streams.current import Event, kept_stream, make_current, memory_of, run_apart

_BUCKETS_HELD = 2
"""How many buckets have their flat buffers held. When one more bucket has been launched, the computing streams wait for
the oldest bucket's sum, except on the root, and its buffers are freed."""


def side_stream(device: torch.device, bucket: int = 0) -> torch.Stream:
    """The stream of an accelerator on which a bucket's gradients travel; ``bucket`` is its number, from 0 on.

    Buckets take turns on a few streams: a sum ends at the root, so on one stream the next one would begin there only
    when it has ended, although most links are free by then.
    """
    return kept_stream(device, "gradients", bucket)


class Made:
    """The stream that made certain tensors, and an event after it did. Made when that work has been launched."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream, self._event = stream, Event(stream)

    def make_wait(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait for the event. The host does not wait."""
        self._event.make_wait(stream)

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Makes the current stream of that device wait for the tensors, and calls ``record_stream`` on their memory."""
        here = torch.accelerator.current_stream(self.stream.device)
        if here == self.stream:
            return
        self.make_wait(here)
        for tensor in tensors:
            for memory in memory_of(tensor):
                memory.record_stream(here)


class GradientStreams:
    """The streams that all buckets of one forward share, and the memory that each backward uses on them.

    Attributes:
        computing: for each accelerator of the call, the stream on which it computes.
        sides: for each of them, the side stream of one bucket; see `of_bucket`.
    """

    def __init__(self, computing: dict[torch.device, torch.Stream]) -> None:
        self.computing = computing
        self.sides = {device: side_stream(device) for device in computing}
        self._key = object()  # of the buffers that a pass holds

    @classmethod
    def for_forward(
        cls, slots: Sequence[torch.device], computing: dict[torch.device, torch.Stream]
    ) -> GradientStreams | None:
        """The streams for a forward on ``slots``; ``None`` where gradients stay on the stream that computes them."""
        return cls(computing) if run_apart(slots) else None

    def of_bucket(self, number: int) -> GradientStreams:
        """The same streams, with the side streams of this bucket."""
        found = copy.copy(self)  # the buffers that passes hold are shared
        found.sides = {device: side_stream(device, number) for device in self.computing}
        return found

    @contextmanager
    def side_streams_set(self, buffers: Sequence[Tensor], made: Sequence[Made]) -> Iterator[None]:
        """Makes the side streams current inside the block, where work may use ``buffers``.

        Called in the backward of a node, with the computing streams current.

        Args:
            buffers: the slots' flat buffers, then the memory of the sum, on the root's device. That is the first
                buffer, or has just been allocated.
            made: for each slot's buffer, when it was made. The side streams wait for these events first.
        """
        *flats, total = buffers
        root = total.device
        held = running_pass().get(self._key, self._held_by)
        for of_flat in made:
            of_flat.make_wait(self.sides[of_flat.stream.device])
        if total is not flats[0]:
            Event(self.computing[root]).make_wait(self.sides[root])
        make_current(self.sides.values())
        try:
            yield
        except BaseException:
            self.release_sum(root)
            raise
        finally:
            make_current(self.computing.values())
            self._record(flats, total, made)
            held.hold([flat for flat in flats if flat is not total], root, self.sides)

    def _record(self, flats: Sequence[Tensor], total: Tensor, made: Sequence[Made]) -> None:
        """Calls ``record_stream`` on buffers whose stream does not wait before they are freed."""
        for flat, of_flat in zip(flats, made, strict=True):
            is_of_another = of_flat.stream != self.computing[flat.device]
            if is_of_another or (flat.device == total.device and flat is not total):
                flat.record_stream(self.sides[flat.device])
            if is_of_another and flat is total:  # if the root's slot has no gradient
                flat.record_stream(self.computing[flat.device])

    def release_sum(self, root: torch.device) -> None:
        """Makes the root's computing stream wait for its side stream, so that memory that is written there is free."""
        Event(self.sides[root]).make_wait(self.computing[root])

    def _held_by(self, running: PassOfBackward) -> _HeldBuffers:
        held = _HeldBuffers(self.computing)
        running.on_end(held.release)
        return held


class _HeldBuffers:
    """The buffers that one pass holds. Its buckets are launched one after the other, in the root's thread."""

    def __init__(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        self._computing = computing
        # The buffers of each bucket, and for each side stream an event after the last work that uses them.
        self._held: deque[tuple[Sequence[Tensor], list[tuple[torch.device, Event]]]] = deque()

    def hold(self, buffers: Sequence[Tensor], root: torch.device, sides: Mapping[torch.device, torch.Stream]) -> None:
        """Holds a bucket's buffers, once the work that uses them has been launched on ``sides``."""
        devices = {buffer.device for buffer in buffers} - {root}
        self._held.append((buffers, [(device, Event(sides[device])) for device in devices]))
        if len(self._held) > _BUCKETS_HELD:
            self._release_oldest()

    def release(self, ok: bool) -> None:
        """Makes the computing streams wait for the side streams, except on the root, and releases all buffers."""
        while self._held:
            self._release_oldest()

    def _release_oldest(self) -> None:
        buffers, events = self._held.popleft()
        for device, event in events:
            event.make_wait(self._computing[device])
        del buffers  # only now: the computing stream may use the memory again
