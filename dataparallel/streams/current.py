"""Current streams and events, for threads that share both, and without touching a device that nobody uses.

torch has all of this, but for two things that a library in one process trips over:

- ``with stream:`` keeps what to go back to on the stream object. Two threads that enter one stream at the same time are
  left on each other's. `streams_set` keeps it in the call.
- Making a device current makes a context on it, which takes hundreds of megabytes and fails where another process has
  the device for itself. ``torch.accelerator.set_device_index`` does so when it goes back to a device that was current
  and not used, and so does a ``torch.Event`` of another device, when it is freed and, before torch 2.15, when it is
  recorded or waited for. Here the stream's device is current meanwhile, and torch goes back to the former one when that
  is used again.

Which stream does what is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from dataparallel.devices import CPU, current_device_set

__all__ = ["Event", "current_streams", "joined", "make_current", "streams_set"]


def current_streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.Stream]:
    """The calling thread's current stream on each accelerator among ``devices``."""
    return {device: torch.accelerator.current_stream(device) for device in {*devices} if device != CPU}


@contextmanager
def streams_set(streams: Mapping[torch.device, torch.Stream]) -> Iterator[None]:
    """Inside, each of ``streams`` is its device's current stream; the current device stays what it is.

    No streams is what there is without accelerators, where nothing can be asked for.
    """
    before = [torch.accelerator.current_stream(device) for device in streams]
    try:
        make_current(streams.values())
        yield
    finally:
        make_current(before)


@contextmanager
def joined(streams: Mapping[torch.device, torch.Stream]) -> Iterator[None]:
    """As `streams_set`, after all that was launched on the streams that were current, and before all that will be."""
    here = current_streams(streams)
    others = {device: stream for device, stream in here.items() if stream != streams[device]}
    for device, stream in others.items():
        Event(stream).hold_back(streams[device])
    with streams_set(streams):
        yield
    for device, stream in others.items():
        Event(streams[device]).hold_back(stream)


def make_current(streams: Collection[torch.Stream]) -> None:
    """Makes each stream its device's current one, in this thread. The current device stays what it is."""
    if not streams:
        return
    with current_device_set(next(iter(streams)).device):
        for stream in streams:
            torch.accelerator.set_stream(stream)  # makes its device the current one


class Event:
    """What a stream has been given to do so far; the stream is asked when this is made. Any thread may use it."""

    def __init__(self, stream: torch.Stream) -> None:
        self._device = stream.device
        with current_device_set(self._device):
            self._event = stream.record_event()

    def hold_back(self, stream: torch.Stream) -> None:
        """Has ``stream`` wait for it. The host does not."""
        with current_device_set(stream.device):
            stream.wait_event(self._event)

    def synchronize(self) -> None:
        """Has the host wait for it."""
        self._event.synchronize()

    def __del__(
        self, device_set: Callable[[torch.device], AbstractContextManager[object]] = current_device_set
    ) -> None:
        # Bound here, because when the interpreter ends the module's names may be gone.
        if hasattr(self, "_event"):
            with device_set(self._device):
                del self._event
