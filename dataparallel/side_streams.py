"""The streams on which gradients travel beside backward, and what orders them against it.

A sum waits for the slowest slot. On the streams that compute it would hold up every device until then, once for each
bucket; on side streams only what uses the sum waits. ``bucket_nodes`` flattens gradients on the streams that compute,
where the root's memory for the sum is made too; `BesideBackward.travelling` has the rest run on side streams. This room
knows neither buckets nor routes. What orders them:

- A side stream waits for the stream that computes before it reads what was flattened there.
- Flat buffers belong to the streams that compute. They are held until those have waited for what reads them, when the
  bucket after the next one travels, by which time that costs nothing, or when backward ends. ``record_stream`` would
  hold them until the host looks again, and by then it may have launched the whole step.
- What takes a sum runs on the root's side stream, because its node was made there (`bucket_nodes.FromSource`), and the
  engine has the caller's stream wait for that one when backward ends. An accumulation into ``.grad`` drops the sum, so
  its memory is held too: until nobody else has it, if ``ownership`` can tell, and the root has waited, or until
  backward ends.

Copies of parameters travel on the streams that compute: the first layer waits for the last slot's copy in any case, and
memory that a side stream fills would have to be recorded for every replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import not_

import torch
from torch import Tensor
from torch.autograd import Variable

from dataparallel import ownership
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.slot_streams import memory_of

__all__ = ["BesideBackward", "beside_backward", "current", "side_stream"]

_UNDER_WAY = 2
"""Buckets whose buffers are held: one that is being summed, and one that travels."""

_side_streams: dict[torch.device, torch.Stream] = {}


def side_stream(device: torch.device) -> torch.Stream:
    """The stream of an accelerator on which gradients travel; one for each device, for the whole process."""
    if device not in _side_streams:
        _side_streams.setdefault(device, torch.Stream(device))
    return _side_streams[device]


@contextmanager
def current(streams: Mapping[torch.device, torch.Stream]) -> Iterator[None]:
    """Inside, each of ``streams`` is its device's current stream; the current device stays what it is.

    No streams is what there is without accelerators, where nothing can be asked for.
    """
    if not streams:
        yield
        return
    before = [torch.accelerator.current_stream(device) for device in streams]
    _set(streams.values())
    try:
        yield
    finally:
        _set(before)


def _set(streams: Iterable[torch.Stream]) -> None:
    here = torch.accelerator.current_device_index()
    for stream in streams:
        torch.accelerator.set_stream(stream)  # makes its device the current one
    torch.accelerator.set_device_index(here)


def beside_backward(
    slots: Sequence[torch.device], computing: dict[torch.device, torch.Stream]
) -> BesideBackward | None:
    """For a forward on ``slots``; ``None`` where gradients do not leave the stream that computes."""
    is_apart = len(computing) > 1 or (computing and len(slots) > 1 and are_slots_isolated())
    return BesideBackward(computing) if is_apart else None


class BesideBackward:
    """The streams that the buckets of one forward share, and the memory that is read there, for each backward."""

    def __init__(self, computing: dict[torch.device, torch.Stream]) -> None:
        """``computing``: the stream on which each accelerator of the call computes."""
        self.computing = computing
        self._sides = {device: side_stream(device) for device in computing}
        # By the engine's number of the pass: each ends by itself, those that reentrant checkpoints nest too.
        self._passes: dict[int, _Pass] = {}

    @contextmanager
    def travelling(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Inside, side streams are current, where those that compute were, and may use ``buffers``.

        Only in a node's backward, as `hold`. The buffers are let go when later ones travel, or when the pass ends.
        """
        this = self._this_pass()
        this.note_sums_that_were_dropped()
        for device, side in self._sides.items():
            side.wait_stream(self.computing[device])
        _set(self._sides.values())
        try:
            yield
        finally:
            _set(self.computing.values())
            this.add(buffers)

    def hold(self, sums: Sequence[Tensor]) -> None:
        """Holds their memory as long as it may be read on side streams; of tensors with parts it is recorded there."""
        by_memory: dict[int, Tensor] = {}
        for total in sums:
            if type(total) is Tensor and total.layout is torch.strided:
                by_memory[total.untyped_storage()._cdata] = total.detach()
            else:
                for memory in memory_of(total):
                    memory.record_stream(self._sides[memory.device])
        self._this_pass().sums += by_memory.values()

    def _this_pass(self) -> _Pass:
        number = torch._C._current_graph_task_id()
        if number not in self._passes:
            self._passes[number] = _Pass(self.computing, self._sides)
            Variable._execution_engine.queue_callback(_End(self._passes, number))
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
        self._buckets = 0
        # With the number of the bucket with which they came, and what was launched beside by then.
        self._under_way: deque[tuple[int, Sequence[Tensor], dict[torch.device, torch.Event]]] = deque()
        # Tensors of their own: `AccumulateGrad` keeps a gradient, and does not copy it, if nobody else has that tensor.
        self.sums: list[Tensor] = []

    def add(self, buffers: Sequence[Tensor]) -> None:
        """One bucket, when what uses it has been launched."""
        self._buckets += 1
        self._hold(buffers)
        self._let_go(self._buckets - _UNDER_WAY)

    def note_sums_that_were_dropped(self) -> None:
        """From now on they wait with the buffers: whatever reads them has been launched."""
        is_dropped = [*map(ownership.is_memory_of_one_tensor, self.sums)]
        if any(is_dropped):
            self._hold([*compress(self.sums, is_dropped)])
            self.sums = [*compress(self.sums, map(not_, is_dropped))]

    def end(self) -> None:
        """Has the streams that compute wait for all that was launched beside them, and lets go of everything."""
        self._hold(self.sums)
        self.sums = []
        self._let_go(self._buckets)

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        self._under_way.append(
            (self._buckets, tensors, {device: side.record_event() for device, side in self._sides.items()})
        )

    def _let_go(self, up_to: int) -> None:
        while self._under_way and self._under_way[0][0] <= up_to:
            _, tensors, events = self._under_way.popleft()
            for device, event in events.items():
                self._computing[device].wait_event(event)
            del tensors
