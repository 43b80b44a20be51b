"""The streams of operators that autograd runs in a backward.

Operators run on the current streams of the owners. In a backward, a thread of autograd runs them. It has current
streams of its own, and torch makes only that of the thread's own device the one that forward has used. So the streams
on which operators with a graph run are remembered. In a backward, operators run on the last of them, where the memory
of their results then belongs; it waits for the others before an operator, and they for it after the operator. As long
as all of them are default streams, there is nothing to do. Its callers are ``operators.run`` and
`ShardedTensor.grad`, which a hook of a backward may read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from dataparallel import _torch
from dataparallel.devices import current_device
from dataparallel.streams.current import Event, current_streams, streams_joined

__all__ = ["ordered", "remember"]

_used: dict[torch.device, dict[torch.Stream, None]] = {}
"""For each device the streams of operators with a graph. torch has few for a device, so they stay few."""

_last: dict[torch.device, torch.Stream] = {}
"""Of these the one that was used last."""


def remember(devices: Collection[torch.device]) -> None:
    """An operator with a graph is about to run on the current streams of the devices."""
    for device, stream in _streams(devices).items():
        _used.setdefault(device, {})[stream] = None
        _last[device] = stream


@contextmanager
def ordered(devices: Collection[torch.device]) -> Iterator[None]:
    """The block runs after what forward has launched on the devices, and before what is launched there after it.

    Outside of a backward it runs on the current streams.
    """
    if not _torch.is_in_backward():
        yield
        return
    with streams_joined(_to_be_set(devices)):
        pairs = [
            (here, other)
            for device, here in _streams(devices).items()
            for other in [*_used.get(device, ())]
            if other != here
        ]
        for here, other in pairs:
            Event(other).make_wait(here)
        try:
            yield
        finally:
            for here, other in pairs:
                Event(here).make_wait(other)


def _to_be_set(devices: Collection[torch.device]) -> dict[torch.device, torch.Stream]:
    """The last stream of each device where another one is current. On the thread's own device torch has set it."""
    return {
        device: _last[device]
        for device, here in _streams(devices).items()
        if _last.get(device, here) != here and device != current_device(device)
    }


def _streams(devices: Collection[torch.device]) -> dict[torch.device, torch.Stream]:
    return current_streams(device for device in devices if device.type != "meta")
