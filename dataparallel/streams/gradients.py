"""Side streams on which gradients travel while backward still computes.

A sum waits for the slowest slot. On the computing streams it would stop every device until then, once for each bucket.
On side streams only the users of the sum wait. ``autograd.bucket_nodes`` flattens gradients on the computing streams
and allocates the sum's memory there; `GradientStreams.side_streams_set` runs the rest on side streams. This room knows
neither buckets nor routes. These events order the streams:

- A side stream waits for the computing stream before it reads the flat buffers that were filled there.
- Flat buffers and sums are memory of the computing streams. They are held until the computing streams have waited for
  the side streams that use them: when the second bucket after them travels, because the wait costs nothing by then, or
  when backward ends. ``record_stream`` would hold them until the host looks again, and by then the host may have
  launched the whole step.
- The root's stream waits for an event after a sum before it uses the sum. It does so when the root has computed its own
  part of the backward (`bucket_nodes.FromSource`).

Copies of parameters have side streams of their own: see ``streams.arrivals``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.streams.current import Event, make_current

__all__ = ["GradientStreams", "side_stream"]

_BUCKETS_HELD = 2
"""How many buckets' buffers are held: one bucket is being summed while the next one travels."""

_side_streams: dict[torch.device, torch.Stream] = {}


def side_stream(device: torch.device) -> torch.Stream:
    """The stream of an accelerator on which gradients travel. There is one for each device in the process."""
    if device not in _side_streams:
        _side_streams.setdefault(device, torch.Stream(device))
    return _side_streams[device]


class GradientStreams:
    """The streams that all buckets of one forward share, and the memory that each backward uses on them.

    ``computing``: for each accelerator of the call, the stream on which it computes.
    """

    def __init__(self, computing: dict[torch.device, torch.Stream]) -> None:
        self.computing = computing
        self._sides = {device: side_stream(device) for device in computing}
        # By the engine's number of the pass: each pass ends by itself, also one that a reentrant checkpoint nests.
        self._passes: dict[int, _Pass] = {}

    @classmethod
    def for_forward(
        cls, slots: Sequence[torch.device], computing: dict[torch.device, torch.Stream]
    ) -> GradientStreams | None:
        """The streams for a forward on ``slots``; ``None`` where gradients stay on the stream that computes them."""
        leave = len(computing) > 1 or (computing and len(slots) > 1 and are_slots_isolated())
        return cls(computing) if leave else None

    @contextmanager
    def side_streams_set(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Makes the side streams current inside the block, where work may use ``buffers``.

        Called in the backward of a node, with the computing streams current. The side streams wait for them first. The
        buffers are released when later ones travel, or when the pass ends.
        """
        this = self._this_pass()
        for device, side in self._sides.items():
            Event(self.computing[device]).make_wait(side)
        make_current(self._sides.values())
        try:
            yield
        finally:
            make_current(self.computing.values())
            this.hold(buffers)

    def _this_pass(self) -> _Pass:
        number = _torch.current_graph_task_id()
        if number not in self._passes:
            self._passes[number] = _Pass(self.computing, self._sides)
            _torch.queue_callback(_End(self._passes, number))
        return self._passes[number]


class _End:
    """Ends a pass: the engine calls it when the pass ends, or drops it if the pass fails."""

    def __init__(self, passes: dict[int, _Pass], number: int) -> None:
        self._passes, self._number = passes, number

    def __call__(self) -> None:
        this = self._passes.pop(self._number, None)
        if this is not None:
            this.end()

    __del__ = __call__


class _Pass:
    """The buffers that one backward holds. Its buckets travel one after the other, in the root's thread."""

    def __init__(
        self, computing: Mapping[torch.device, torch.Stream], sides: Mapping[torch.device, torch.Stream]
    ) -> None:
        self._computing, self._sides = computing, sides
        # The buffers of each bucket, and for each side stream an event after the last work that uses them.
        self._held: deque[tuple[Sequence[Tensor], list[tuple[torch.device, Event]]]] = deque()

    def hold(self, buffers: Sequence[Tensor]) -> None:
        """Holds a bucket's buffers, once the work that uses them has been launched."""
        self._held.append((buffers, [(device, Event(side)) for device, side in self._sides.items()]))
        if len(self._held) > _BUCKETS_HELD:
            self._release_oldest()

    def end(self) -> None:
        """Makes the computing streams wait for the side streams, and releases all buffers."""
        while self._held:
            self._release_oldest()

    def _release_oldest(self) -> None:
        buffers, events = self._held.popleft()
        for device, event in events:
            event.make_wait(self._computing[device])
        del buffers  # only now: the computing stream may use the memory again
