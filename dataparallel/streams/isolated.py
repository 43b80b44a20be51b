"""Streams for isolated slots: on each accelerator every slot but the first has a stream of its own.

Isolation is for tests (``dataparallel.testing.isolated_slots``). It makes slots on one device behave like slots on
several devices: they compute at the same time, and only events order them. ``threads.caller_state`` makes a slot's
stream current while its replica runs, ``parallel_apply`` says which memory goes in and comes out, and
``autograd.bucket_nodes`` receives each slot's gradients on that stream. These events order the streams:

- A slot's stream waits for an event that the caller's stream recorded before any replica began. It does not wait for
  the caller's stream as it is when the replica begins: by then the first replica has launched work there.
- The caller's stream waits for an event at the end of each replica, also if the replica raised an error.
- ``record_stream`` names the slot's stream for memory of the caller's stream that a replica uses, because it may be
  freed there, by a module that replaces a buffer or by the backward. Outputs are memory of the slot's stream; for them
  it names the caller's.
- In backward the engine runs each node on the stream of its forward, and orders gradients between the streams of one
  device. ``streams.nodes`` orders gradients that go to another device.

Streams are made when first needed and stay for the process. So a slot finds on its stream what its last call left
there, such as a frozen buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.batch_types import batch_of, container_of
from dataparallel.comm.settings import are_slots_isolated
from dataparallel.devices import CPU
from dataparallel.streams.current import Event
from dataparallel.streams.nodes import memory_of

__all__ = ["IsolatedStream", "isolated_streams", "run_apart"]

_made: dict[torch.device, list[torch.Stream]] = {}


def run_apart(slots: Sequence[torch.device]) -> bool:
    """True if slots compute on several streams: on several accelerators, or isolated on one."""
    accelerators = {*slots} - {CPU}
    return len(accelerators) > 1 or (len(accelerators) == 1 and len(slots) > 1 and are_slots_isolated())


def isolated_streams(slots: Sequence[torch.device]) -> dict[int, IsolatedStream]:
    """A stream for each isolated slot that shares its accelerator with an earlier slot; empty without isolation.

    The streams' replicas wait for all that the calling thread has launched on its current streams before this call.
    """
    if not are_slots_isolated():
        return {}
    found: dict[int, IsolatedStream] = {}
    ready: dict[torch.device, tuple[torch.Stream, Event]] = {}
    for slot, device in enumerate(slots):
        if device == CPU or device not in slots[:slot]:
            continue
        if device not in ready:
            callers = torch.accelerator.current_stream(device)
            ready[device] = callers, Event(callers)
        callers, event = ready[device]
        found[slot] = IsolatedStream(_stream(device, slots[:slot].count(device), callers), callers, event)
    return found


def _stream(device: torch.device, ordinal: int, callers: torch.Stream) -> torch.Stream:
    """The stream number ``ordinal``, from 1 on. The caller's is not counted: the caller may itself be a replica."""
    made = _made.setdefault(device, [])
    while True:
        others = [stream for stream in made if stream != callers]
        if len(others) >= ordinal:
            return others[ordinal - 1]
        made.append(torch.Stream(device))


class IsolatedStream:
    """The stream of one slot during one call. ``stream`` is current in the slot's replica."""

    def __init__(self, stream: torch.Stream, callers: torch.Stream, ready: Event) -> None:
        self.stream = stream
        self._callers, self._ready = callers, ready
        self._ended: Event | None = None

    def wait_for_caller(self) -> None:
        """Orders the replica after what its caller has launched before the call."""
        self._ready.make_wait(self.stream)

    def note_end(self) -> None:
        """Records the event at the end of the replica."""
        self._ended = Event(self.stream)

    def make_caller_wait(self) -> None:
        """Orders what the caller launches from here on after the replica."""
        if self._ended is not None:
            self._ended.make_wait(self._callers)

    def record_inputs(self, *objects: Any) -> None:
        """Names the slot's stream for memory of the caller: the replica uses these modules and structures."""
        _record(objects, self.stream)

    def record_output(self, output: Any) -> None:
        """Names the caller's stream for memory of the slot: the caller uses this structure."""
        _record(output, self._callers)


def _record(obj: Any, stream: torch.Stream) -> None:
    for tensor in _tensors(obj, {}):
        for memory in memory_of(tensor):
            if memory.device == stream.device:
                memory.record_stream(stream)


def _tensors(obj: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """The tensors in a structure or a module. Other objects are not searched."""
    if id(obj) in seen:
        return
    seen[id(obj)] = obj
    if isinstance(obj, Tensor):
        yield obj
        return
    parts: list[Any] = []
    if isinstance(obj, nn.Module):
        registries: Any = chain.from_iterable((child._parameters, child._buffers) for child in obj.modules())
        # A replica's registry makes the current stream wait, except for dict's own methods. A ScriptModule has none.
        parts = [
            tensor
            for registry in registries
            for tensor in (dict.values(registry) if isinstance(registry, dict) else registry.values())
            if tensor is not None
        ]
    elif (container := container_of(obj)) is not None:
        parts = [value for _, value in container.children(obj)]
    elif batch_of(obj) is not None:
        parts = [*getattr(obj, "__dict__", {}).values()]
    for part in parts:
        yield from _tensors(part, seen)
