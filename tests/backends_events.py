"""Events as a backend's own class has them: what `torch.Event` holds is empty, as in a ``torch.cuda.Event``."""

from typing import Any

import torch


class BackendsEvent(torch.Event):
    """An event that only its own methods record and wait for."""

    def __new__(cls, *args: Any) -> "BackendsEvent":
        return super().__new__(cls)

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self, stream: torch.Stream) -> None:
        self._event.wait(stream)

    def synchronize(self) -> None:
        self._event.synchronize()


class BackendsStream(torch.Stream):
    """A stream that records such events."""

    def record_event(self) -> BackendsEvent:
        return BackendsEvent(super().record_event())


def as_of_backend(stream: torch.Stream) -> BackendsStream:
    """The same stream, as one of the backend's class."""
    index, kind = stream.device_index, stream.device_type
    return BackendsStream(stream_id=stream.stream_id, device_index=index, device_type=kind)
