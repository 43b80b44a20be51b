"""The streams on which gradients travel beside backward, and what orders them against it.

A sum waits for the slowest slot. On the streams that compute it would hold up every device until then, once for each
bucket; on side streams only what uses the sum waits. ``autograd.bucket_nodes`` flattens gradients on the streams that
compute, where the root's memory for the sum is made too; `GradientStreams.travelling` has the rest run on side streams.
This room knows neither buckets nor routes. What orders them:

- A side stream waits for the stream that computes before it reads what was flattened there.
- Flat buffers, and sums, belong to the streams that compute. They are held until those have waited for what uses them,
  when the bucket after the next one travels, by which time that costs nothing, or when backward ends. ``record_stream``
  would hold them until the host looks again, and by then it may have launched the whole step.
- The root's stream waits for an event after a sum before it uses it, which is when the root has computed its own part
  (`bucket_nodes.FromSource`).

Copies of parameters travel on the streams that compute: the first layer waits for the last slot's copy in any case, and
memory that a side stream fills would have to be recorded for every replica.
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

__all__ = ["GradientStreams", "gradient_streams", "side_stream"]

_UNDER_WAY = 2
"""Buckets whose buffers are held: one that is being summed, and one that travels."""

_side_streams: dict[torch.device, torch.Stream] = {}


def side_stream(device: torch.device) -> torch.Stream:
    """The stream of an accelerator on which gradients travel; one for each device, for the whole process."""
    if device not in _side_streams:
        _side_streams.setdefault(device, torch.Stream(device))
    return _side_streams[device]


def gradient_streams(
    slots: Sequence[torch.device], computing: dict[torch.device, torch.Stream]
) -> GradientStreams | None:
    """For a forward on ``slots``; ``None`` where gradients do not leave the stream that computes."""
    is_apart = len(computing) > 1 or (computing and len(slots) > 1 and are_slots_isolated())
    return GradientStreams(computing) if is_apart else None


class GradientStreams:
    """The streams that the buckets of one forward share, and the memory that is used there, for each backward."""

    def __init__(self, computing: dict[torch.device, torch.Stream]) -> None:
        """``computing``: the stream on which each accelerator of the call computes."""
        self.computing = computing
        self._sides = {device: side_stream(device) for device in computing}
        # By the engine's number of the pass: each ends by itself, those that reentrant checkpoints nest too.
        self._passes: dict[int, _Pass] = {}

    @contextmanager
    def travelling(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Inside, side streams are current, where those that compute were, and may use ``buffers``.

        Only in a node's backward. The buffers are let go when later ones travel, or when the pass ends.
        """
        this = self._this_pass()
        for device, side in self._sides.items():
            Event(self.computing[device]).hold_back(side)
        make_current(self._sides.values())
        try:
            yield
        finally:
            make_current(self.computing.values())
            this.add(buffers)

    def _this_pass(self) -> _Pass:
        number = _torch.current_graph_task_id()
        if number not in self._passes:
            self._passes[number] = _Pass(self.computing, self._sides)
            _torch.queue_callback(_End(self._passes, number))
        return self._passes[number]


class _End:
    """Ends a pass when the engine calls it; or when the engine, which alone has it, drops it, since the pass fails."""

    def __init__(self, passes: dict[int, _Pass], number: int) -> None:
        self._passes, self._number = passes, number

    def __call__(self) -> None:
        this = self._passes.pop(self._number, None)
        if this is not None:
            this.end()

    __del__ = __call__


class _Pass:
    """What is held in one backward. Its buckets travel one after the other, in the root's thread."""

    def __init__(
        self, computing: Mapping[torch.device, torch.Stream], sides: Mapping[torch.device, torch.Stream]
    ) -> None:
        self._computing, self._sides = computing, sides
        # The buffers of each bucket, with what was launched beside by then.
        self._under_way: deque[tuple[Sequence[Tensor], list[tuple[torch.device, Event]]]] = deque()

    def add(self, buffers: Sequence[Tensor]) -> None:
        """One bucket, when what uses it has been launched."""
        self._under_way.append((buffers, [(device, Event(side)) for device, side in self._sides.items()]))
        if len(self._under_way) > _UNDER_WAY:
            self._let_go()

    def end(self) -> None:
        """Has the streams that compute wait for all that was launched beside them, and lets go of everything."""
        while self._under_way:
            self._let_go()

    def _let_go(self) -> None:
        """Of the bucket that has been under way for longest."""
        buffers, events = self._under_way.popleft()
        for device, event in events:
            event.hold_back(self._computing[device])
        del buffers  # not before
