"""`Event`, `streams_set` and `kept_stream`: events and streams, safe for several threads and for unused devices.

torch's own events and contexts have effects that hurt a library with many threads in one process: `streams_set`,
`Event` and `GivenEvents` name them. Other files decide which stream does what.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import current_stream_at, exchange_device, go_back_to_device
from dataparallel.comm.kinds import inner_tensors, is_wrapper
from dataparallel.devices import CPU, current_device_set

_STREAMS: Mapping[str, tuple[int, ...]] = {
    "parameters": (0,),
    "gathers": (0,),
    "flat buffers": (1,),
    "shards are cast": (1,),
    "calls meet": (1,),
    "casts meet": (1,),
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
"""For each purpose the numbers of its streams on a device, taken in turn. Eight streams serve all slots and models.

CUDA puts the streams of a device into as many hardware queues as ``CUDA_DEVICE_MAX_CONNECTIONS`` says, eight if it is
not set, and streams in one queue wait for each other. torch has 32 streams for each device, and then hands out the
same ones again. So purposes share streams, by this table and nowhere else.

A shared stream cannot cause a deadlock, because a stream waits only for earlier launches. But work that waits long
holds up later work on its stream. So a stream serves purposes of different forms, because a model has one form, or
purposes that wait for each other anyway:

- The cast of shards waits for all work that the call began with, for which ``calls meet`` stands.
- ``pulls meet`` on the stream on which the first slot receives, and not where sums meet: every pass of backward waits
  for its pulls at its end, and need not wait for sums, except the last pass.
- In backward a gather ahead waits for the last sums, for which ``sums meet`` stands.
- The first owner's sum waits for the deliveries that meet.
- Shards leave for several slots on four streams in turn. With two, a device waits for slots that lag.

``hooks`` and ``collectives`` launch work that waits for other machines, which runs on streams of the process group.
"""

_kept: dict[tuple[torch.device, int], torch.Stream] = {}
_for_captures: list[torch.Stream] = []
_idle: list[torch.Stream] = []  # those of `_for_captures` that nobody captures on
_making = threading.Lock()

_TORCH_HAS = 32
"""How many streams of a device torch hands out in turn."""


def kept_stream(device: torch.device, purpose: str, number: int = 0) -> torch.Stream:
    """A stream of an accelerator that the library keeps for the whole process. All threads get the same one.

    ``number``: of a slot or a bucket. Slots, or buckets, take the purpose's streams in turn.
    """
    streams = _STREAMS[purpose]
    key = device, streams[number % len(streams)]
    if key not in _kept:
        with _making:
            if key not in _kept:
                _kept[key] = _another(device)
    return _kept[key]


def _another(device: torch.device) -> torch.Stream:
    """A stream that is neither kept nor for captures, if the device has so many."""
    taken = [*_for_captures, *(stream for (where, _), stream in _kept.items() if where == device)]
    for _ in range(_TORCH_HAS):
        stream = torch.Stream(device)
        if stream not in taken:
            break
    return stream


def new_capture_stream(device: torch.device) -> torch.Stream | None:
    """A stream to capture on, for the caller alone until `drop_capture_stream`; ``None`` if the device has no more.

    What a stream gets while it captures becomes a part of a graph. And torch may free the workspaces of a capture
    stream when a graph dies that was captured on it. An idle stream comes first: on a new one cuBLAS would take another
    workspace, of 32 MiB on large GPUs, and torch would sooner hand out a stream of the user's again.
    """
    with _making:
        for stream in reversed(_idle):
            if stream.device == device:
                _idle.remove(stream)
                return stream
        stream = _another(device)
        if stream in _for_captures or stream in _kept.values():
            return None
        _for_captures.append(stream)
        return stream


def drop_capture_stream(stream: torch.Stream) -> None:
    """Lets other captures have the stream. It takes no lock, because a finalizer may call it at any time."""
    _idle.append(stream)


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.Stream]:
    """The calling thread's current stream on each accelerator among ``devices``."""
    return {device: current_stream_at(device.index) for device in {*devices} if device != CPU}


def run_apart(slots: Sequence[torch.device]) -> bool:
    """True if slots compute on several streams, because they are on two or more accelerators."""
    return len({*slots} - {CPU}) > 1


@contextmanager
def streams_set(streams: Mapping[torch.device, torch.Stream]) -> Iterator[None]:
    """Makes each of ``streams`` its device's current stream inside the block. The current device does not change.

    ``with stream:`` stores the former stream on the stream object. If two threads enter one stream at the same time,
    each may go back to the other's stream. This function stores the former streams in the call.
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

    The block runs after all earlier work of the streams that were current, and before all their later work. On each
    device whose stream changes, one event at the beginning and one at the end order this.
    """
    before = current_streams(streams)
    replaced = {device: stream for device, stream in before.items() if stream != streams[device]}
    for device, stream in replaced.items():
        Event(stream).make_wait(streams[device])
    try:
        with streams_set(streams):
            yield
    finally:  # what a block that raises has launched comes before later work too
        for device, stream in replaced.items():
            Event(streams[device]).make_wait(stream)


def make_current(streams: Collection[torch.Stream]) -> None:
    """Makes each stream its device's current one, in this thread. The current device does not change."""
    if not streams:
        return
    with current_device_set(next(iter(streams)).device):
        for stream in streams:
            torch.accelerator.set_stream(stream)  # makes its device the current one


def memory_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the data of ``tensor``, on which ``record_stream`` can be called.

    They are other tensors if ``tensor`` has no memory of its own (sparse, subclass), or is lazily conjugated or
    negated: torch would call ``record_stream`` on a temporary copy, and then corrupt the memory of the process.
    """
    if tensor.layout is torch.sparse_coo:
        return [*_torch.sparse_memory(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_wrapper(tensor):
        return [memory for inner in inner_tensors(tensor).values() for memory in memory_of(inner)]
    if tensor.is_conj() or tensor.is_neg():
        return [tensor.new_empty(0).set_(tensor.untyped_storage())]
    return [tensor]


class Event:
    """An event after all work that ``stream`` has been given so far. Any thread may use it.

    When a ``torch.Event`` is freed and, before torch 2.15, recorded or waited for, torch creates a context on the
    current device, even if that device is unused. A context takes hundreds of megabytes. So this class makes the
    stream's device current meanwhile, and torch goes back to the former device only when it is used again.

    ``timed``: the event records its time. A backend without such events raises as torch does.
    """

    def __init__(self, stream: torch.Stream, timed: bool = False) -> None:
        self._index = stream.device_index
        before = exchange_device(self._index)
        try:
            self._event = torch.Event(stream.device, enable_timing=timed)
            self._event.record(stream)
        finally:
            go_back_to_device(before)

    def make_wait(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait for the event. The host does not wait."""
        _make_wait(stream, self._event)

    def synchronize(self) -> None:
        """Makes the host wait for the event."""
        self._event.synchronize()

    def has_passed(self) -> bool:
        """True if the device has done the work before the event. The host does not wait."""
        return bool(self._event.query())

    def seconds_until(self, later: Event) -> float:
        """The seconds between two timed events of one device, which must have passed both."""
        return 1e-3 * float(self._event.elapsed_time(later._event))

    def __del__(
        self, exchange: Callable[[int], int] = exchange_device, go_back: Callable[[int], object] = go_back_to_device
    ) -> None:
        # Default arguments, because the module's names may be gone when the interpreter exits.
        if hasattr(self, "_event"):
            before = exchange(self._index)
            try:
                del self._event
            finally:
                go_back(before)


class GivenEvents(Event):
    """Events that a user has recorded, of torch's class or of the backend's, as one event.

    ``stream.wait_event`` silently does not wait for a backend's event; ``event.wait(stream)`` works for both classes.
    """

    def __init__(self, events: Iterable[torch.Event]) -> None:
        self._events = [*events]

    def make_wait(self, stream: torch.Stream) -> None:
        for event in self._events:
            _make_wait(stream, event)

    def synchronize(self) -> None:
        """Makes the host wait for the events."""
        for event in self._events:
            event.synchronize()


def _make_wait(stream: torch.Stream, event: torch.Event) -> None:
    if type(event) is not torch.Event:
        # A backend's event takes the backend's streams. Older releases of torch misread a stream of another class.
        kind = getattr(torch.get_device_module(stream.device), "Stream", type(stream))
        if not isinstance(stream, kind):
            index, type_ = stream.device_index, stream.device_type
            stream = kind(stream_id=stream.stream_id, device_index=index, device_type=type_)
    before = exchange_device(stream.device_index)
    try:
        event.wait(stream)
    finally:
        go_back_to_device(before)


RECEIVING, SENDING = 0, 1
"""The numbers of a device's streams: it receives on the caller's stream, and sends on a further one."""


def wavefront(hops: int, pieces: int) -> list[tuple[int, int]]:
    """Pairs of hop and piece, in the order in which the host launches them so that no device waits for the host."""
    steps = range(hops + pieces - 1)
    return [(step - piece, piece) for step in steps for piece in range(pieces) if 0 <= step - piece < hops]


class PieceStreams:
    """For each device of a call the caller's current stream, which has number 0, and further ones.

    torch orders a copy between devices against the current streams of both, so on one stream a device that passes data
    on cannot receive while it sends.
    Nothing orders the streams of a device against each other, except copies that share a stream of another device.
    ``broadcast_pieces``: how many pieces have been sent along chains; the next piece takes the next stream.
    """

    def __init__(self, streams: Mapping[torch.device, Sequence[torch.Stream]]) -> None:
        self._streams = streams
        self.first = {device: first for device, (first, *_) in streams.items()}
        self._current = dict(self.first)
        self._used: defaultdict[torch.device, set[torch.Stream]] = defaultdict(set)
        self.broadcast_pieces = 0

    def take_used(self, device: torch.device) -> Sequence[torch.Stream]:
        """The device's streams that `use` has made current since the last call of this method, or else stream 0."""
        streams, used = self._streams.get(device, ()), self._used.pop(device, ())
        return [stream for stream in streams if stream in used] or streams[:1]

    def use(self, device: torch.device, number: int) -> None:
        """Makes stream ``number``, modulo the number of streams, of the device current. On the CPU it does nothing."""
        if device in self._streams:
            stream = self._streams[device][number % len(self._streams[device])]
            self._used[device].add(stream)
            self._make_current(device, stream)

    def use_first(self) -> None:
        """Makes the caller's streams current again."""
        for device, first in self.first.items():
            self._make_current(device, first)

    def _make_current(self, device: torch.device, stream: torch.Stream) -> None:
        if self._current[device] != stream:
            torch.accelerator.set_stream(stream)
            self._current[device] = stream


_outer = threading.local()  # ``streams``: the `PieceStreams` of the block around this code


def _streams_around(devices: Iterable[torch.device]) -> PieceStreams | None:
    """The `PieceStreams` of the block around this code, if stream 0 of each of ``devices`` is the current one."""
    outer: PieceStreams | None = getattr(_outer, "streams", None)
    return outer if outer is not None and current_streams(devices).items() <= outer.first.items() else None


def are_pieces_under_way(devices: Sequence[torch.device]) -> bool:
    """True inside a block of `piece_streams` for these devices, once pieces have been broadcast there."""
    streams = _streams_around(devices)
    return streams is not None and streams.broadcast_pieces > 0


@contextmanager
def piece_streams(devices: Collection[torch.device], number: int = 2) -> Iterator[PieceStreams]:
    """Inside the block, `PieceStreams.use` makes one of ``number`` streams of a device current.

    At the beginning each further stream waits for the caller's stream. At the end, also after an error, the caller's
    stream waits for them and is current again, so nothing needs ``record_stream``. Two streams are enough if all pieces
    take the same time; with a third one, late pieces catch up. With fewer than two accelerators, or with ``number=1``,
    nothing can overlap, and all work stays on the caller's streams.

    A block inside another one for the same devices, in one thread, shares the outer streams, whatever its ``number``.
    It orders nothing at its beginning and end, so buffers follow each other without waiting. They have to exist before
    the outer block, and work that uses one there has to wait for the streams that received it, see
    `PieceStreams.take_used`.
    """
    if (around := _streams_around(devices)) is not None:
        try:
            yield around
        finally:
            around.use_first()
        return
    here = current_streams(devices)
    streams: dict[torch.device, list[torch.Stream]] = {}
    if len(here) > 1 < number:
        streams = {
            device: [stream, *(kept_stream(device, "pieces", further) for further in range(number - 1))]
            for device, stream in here.items()
        }
    pieces = PieceStreams(streams)
    if not streams:
        yield pieces
        return
    before, _outer.streams = getattr(_outer, "streams", None), pieces
    # `torch.accelerator.set_stream` changes the current device, which is restored once, at the end.
    with current_device_set(next(iter(streams))):
        for current, *further in streams.values():
            for stream in further:
                stream.wait_stream(current)
        try:
            yield pieces
        finally:
            _outer.streams = before
            pieces.use_first()
            for current, *further in streams.values():
                for stream in further:
                    current.wait_stream(stream)
