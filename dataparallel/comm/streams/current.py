"""Current streams, kept streams and events, safe for several threads and for devices that nobody uses.

torch has these too, but some of their effects hurt a library that runs in one process: see `streams_set`, `Event` and
`GivenEvents`. The other rooms decide which stream does what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import current_stream_at, exchange_device, go_back_to_device
from dataparallel.devices import CPU, current_device_set

_STREAMS: Mapping[str, tuple[int, ...]] = {
    "parameters": (0,),
    "gathers": (0,),
    "flat buffers": (1,),
    "shards are cast": (1,),
    "calls meet": (1,),
    "pulls meet": (0,),
    "sums meet": (1,),
    "hooks": (1,),
    "collectives": (1,),
    "peers are checked": (1,),
    "inputs": (2,),
    "sums": (3,),
    "deliveries meet": (3,),
    "gradients": (3, 4, 5, 6),
    "shards leave": (4, 5, 6, 7),
    "pieces": (7, 6),
}
"""For each purpose its streams on a device, which are taken in turn: eight, whatever the number of slots and models.

CUDA puts the streams of a device into as many hardware queues as ``CUDA_DEVICE_MAX_CONNECTIONS`` says, eight if it is
not set, and streams in one queue wait for each other. torch has 32 streams for each device, and then hands out the
same ones again. So purposes share streams, by this table and nowhere else.

Streams that are shared cannot wait for each other in a circle: a stream only waits for what was launched before. But
work that waits long holds up what is launched behind it. So a stream has purposes of different forms, since a model has
one form, or those that wait for each other anyway:

- Shards are cast after all that the call began with, which is what ``calls meet`` stands for.
- ``pulls meet`` where the first slot receives. They do not meet where sums do: what waits for pulls, as every pass of
  backward does at its end, need not wait for the sums of a pass that is not the last.
- In backward a gather ahead waits for the last sums, which are what ``sums meet`` stands for.
- The first owner's sum waits for the deliveries that meet.
- Shards leave for several slots on four streams in turn. With two, a device was seen to wait for slots that lag:
  predicted steps on 8 devices took a third longer. With four they took 2 % longer than with a stream for each slot.

``hooks`` and ``collectives`` launch what waits for other machines, which runs on streams of the process group.
"""

_kept: dict[tuple[torch.device, int], torch.Stream] = {}


def kept_stream(device: torch.device, purpose: str, number: int = 0) -> torch.Stream:
    """A stream of an accelerator that the library keeps for the whole process. Threads that ask get the same one.

    ``number``: of a slot or a bucket, which take the purpose's streams in turn.
    """
    streams = _STREAMS[purpose]
    key = device, streams[number % len(streams)]
    if key not in _kept:
        _kept.setdefault(key, torch.Stream(device))
    return _kept[key]


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.Stream]:
    """The calling thread's current stream on each accelerator among ``devices``."""
    return {device: current_stream_at(device.index) for device in {*devices} if device != CPU}


def run_apart(slots: Sequence[torch.device]) -> bool:
    """True if slots compute on several streams: on two or more accelerators."""
    return len({*slots} - {CPU}) > 1


@contextmanager
def streams_set(streams: Mapping[torch.device, torch.Stream]) -> Iterator[None]:
    """Makes each of ``streams`` its device's current stream inside the block. The current device does not change.

    ``with stream:`` stores the former stream on the stream object: of two threads that enter one stream at the same
    time, each could end on the other's. This stores it in the call. Without accelerators nothing is done.
    """
    before = [current_stream_at(device.index) for device in streams]
    try:
        make_current(streams.values())
        yield
    finally:
        make_current(before)


@contextmanager
def streams_joined(streams: Mapping[torch.device, torch.Stream]) -> Iterator[None]:
    """`streams_set`, ordered against the streams that were current.

    The block runs after everything that was launched on those streams before it, and before everything that is launched
    on them after it. On each device whose stream changes, one event at the beginning and one at the end order this.
    """
    here = current_streams(streams)
    others = {device: stream for device, stream in here.items() if stream != streams[device]}
    for device, stream in others.items():
        Event(stream).make_wait(streams[device])
    with streams_set(streams):
        yield
    for device, stream in others.items():
        Event(streams[device]).make_wait(stream)


def make_current(streams: Collection[torch.Stream]) -> None:
    """Makes each stream its device's current one, in this thread. The current device does not change."""
    if not streams:
        return
    with current_device_set(next(iter(streams)).device):
        for stream in streams:
            torch.accelerator.set_stream(stream)  # makes its device the current one


def memory_of(tensor: Tensor) -> list[Tensor]:
    """Tensors on which ``record_stream`` can be called, and that hold the data of ``tensor``.

    They are not the tensor itself if it has no memory of its own (sparse, subclass). Nor if it is conjugated or negated
    lazily: torch would call ``record_stream`` on a temporary copy, and then corrupt the memory of the process.
    """
    if tensor.layout is torch.sparse_coo:
        return [*_torch.sparse_memory(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that holds other tensors
        names, _ = tensor.__tensor_flatten__()
        return [memory for name in names for memory in memory_of(getattr(tensor, name))]
    if tensor.is_conj() or tensor.is_neg():
        return [tensor.new_empty(0).set_(tensor.untyped_storage())]
    return [tensor]


class Event:
    """The work that ``stream`` has been given until the event is made. Any thread may use the event.

    A ``torch.Event`` creates a context, which takes hundreds of megabytes, on the device that is current but not used,
    when it is freed and, before torch 2.15, when it is recorded or waited for. So the stream's device is current
    meanwhile, and torch goes back to the former one only when that is used again.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._index = stream.device_index
        before = exchange_device(self._index)
        try:
            self._event = stream.record_event()
        finally:
            go_back_to_device(before)

    def make_wait(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait for the event. The host does not wait."""
        before = exchange_device(stream.device_index)
        try:
            _make_wait(stream, self._event)
        finally:
            go_back_to_device(before)

    def synchronize(self) -> None:
        """Makes the host wait for the event."""
        self._event.synchronize()

    def has_passed(self) -> bool:
        """True if the device has come to the event. The host does not wait."""
        return bool(self._event.query())

    def __del__(
        self, exchange: Callable[[int], int] = exchange_device, go_back: Callable[[int], object] = go_back_to_device
    ) -> None:
        # Bound here, because the module's names may be gone when the interpreter exits.
        if hasattr(self, "_event"):
            before = exchange(self._index)
            try:
                del self._event
            finally:
                go_back(before)


class GivenEvents(Event):
    """Events that a user has recorded, of torch's class or of the backend's. All of them have to pass.

    ``stream.wait_event`` does not wait for a backend's event, without an error; ``event.wait(stream)`` is always right.
    """

    def __init__(self, events: Iterable[torch.Event]) -> None:
        self._events = [*events]

    def make_wait(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait for the events."""
        with current_device_set(stream.device):
            for event in self._events:
                _make_wait(stream, event)

    def synchronize(self) -> None:
        """Makes the host wait for the events."""
        for event in self._events:
            event.synchronize()

    def has_passed(self) -> bool:
        """True if the device has come to all of the events."""
        return all(event.query() for event in self._events)


def _make_wait(stream: torch.Stream, event: torch.Event) -> None:
    if type(event) is not torch.Event:
        # A backend's event takes the backend's streams. Older releases of torch read any other as if it were one.
        kind = getattr(torch.get_device_module(stream.device), "Stream", type(stream))
        if not isinstance(stream, kind):
            index, type_ = stream.device_index, stream.device_type
            stream = kind(stream_id=stream.stream_id, device_index=index, device_type=type_)
    event.wait(stream)


class TimedEvent(Event):
    """An event that knows when it has passed. A backend without such events raises as torch does."""

    def __init__(self, stream: torch.Stream) -> None:
        self._index = stream.device_index
        before = exchange_device(self._index)
        try:
            self._event = torch.Event(stream.device, enable_timing=True)
            self._event.record(stream)
        finally:
            go_back_to_device(before)

    def seconds_until(self, later: TimedEvent) -> float:
        """The seconds between two events of one device. Both must have passed."""
        return 1e-3 * float(self._event.elapsed_time(later._event))


Marks: TypeAlias = "dict[Any, TimedEvent]"
"""An event for each device, or for each stream."""


class DeviceClock:
    """Marks streams, and says later how long devices took between two marks. Any thread may use it.

    A time includes what a stream waits for: other streams, and a host that has launched nothing yet. It has not run on
    GPUs.
    """

    def __init__(self) -> None:
        self._has_times = True

    def marks(self, streams: Mapping[Any, torch.Stream]) -> Marks:
        """An event on each stream; none if the backend has no events with times."""
        if not self._has_times:
            return {}
        try:
            return {key: TimedEvent(stream) for key, stream in streams.items()}
        except (RuntimeError, NotImplementedError):
            self._has_times = False
            return {}

    def seconds(self, begin: Marks, end: Marks) -> dict[Any, float]:
        """For each key of both the seconds between its marks, to which the devices have come."""
        return {key: begin[key].seconds_until(end[key]) for key in begin.keys() & end.keys()}

    @staticmethod
    def have_passed(marks: Marks) -> bool:
        """True if the devices have come to all of these marks. The host does not wait."""
        return all(event.has_passed() for event in marks.values())

    @staticmethod
    def wait_for(marks: Iterable[Marks]) -> None:
        """Makes the host wait for marks."""
        for each in marks:
            for event in each.values():
                event.synchronize()
