"""Streams for isolated slots: on an accelerator every slot but the first has one of its own.

Isolation is for tests (``dataparallel.testing.isolated_slots``), and there slots on one device are what slots on
several are: they compute beside each other, and only events order them. ``threads.settings`` makes a slot's stream
current while its replica runs, ``parallel_apply`` tells which memory goes in and comes out, and
``autograd.bucket_nodes`` asks in backward whose gradients it reads. What orders them:

- A slot's stream waits for an event that the caller's stream recorded before any replica began. It does not wait for
  that stream as it is when the replica begins, which would be after what the first replica has launched there.
- The caller's stream waits for an event of the slot's at the end of its replica, an error or not.
- Memory of the caller's stream that a replica uses is recorded on the slot's stream, since it may be freed there, by a
  module that replaces a buffer or by the backward. Outputs are the slot's, and recorded on the caller's.
- In backward the engine runs each node on the stream of its forward, and orders gradients between the streams of one
  device. Where gradients go to another device, ``streams.nodes`` orders those of the device that they leave.

Streams are made when first needed and stay for the process: a slot that has them for itself in one call finds there
what it left, a frozen buffer for example.
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

__all__ = ["SlotStream", "slot_streams"]

_made: dict[torch.device, list[torch.Stream]] = {}


def slot_streams(slots: Sequence[torch.device]) -> dict[int, SlotStream]:
    """A stream for each isolated slot that shares its accelerator with an earlier one. Elsewhere none.

    They begin after what the calling thread has launched so far on its current streams.
    """
    if not are_slots_isolated():
        return {}
    found: dict[int, SlotStream] = {}
    ready: dict[torch.device, tuple[torch.Stream, Event]] = {}
    for slot, device in enumerate(slots):
        if device == CPU or device not in slots[:slot]:
            continue
        if device not in ready:
            callers = torch.accelerator.current_stream(device)
            ready[device] = callers, Event(callers)
        callers, event = ready[device]
        found[slot] = SlotStream(_stream(device, slots[:slot].count(device), callers), callers, event)
    return found


def _stream(device: torch.device, ordinal: int, callers: torch.Stream) -> torch.Stream:
    """The stream number ``ordinal``, from 1 on, among those that are not the caller's: he may be a replica himself."""
    made = _made.setdefault(device, [])
    while True:
        others = [stream for stream in made if stream != callers]
        if len(others) >= ordinal:
            return others[ordinal - 1]
        made.append(torch.Stream(device))


class SlotStream:
    """The stream of one slot during one call. ``stream`` is current in its replica."""

    def __init__(self, stream: torch.Stream, callers: torch.Stream, ready: Event) -> None:
        self.stream = stream
        self._callers, self._ready = callers, ready
        self._ended: Event | None = None

    def begin(self) -> None:
        """Orders the replica after what its caller has launched."""
        self._ready.hold_back(self.stream)

    def end(self) -> None:
        """Notes where the replica ends."""
        self._ended = Event(self.stream)

    def lend(self, *objects: Any) -> None:
        """The replica uses these modules and structures, which are the caller's."""
        _record(objects, self.stream)

    def join(self) -> None:
        """Orders what the caller launches from here on after the replica."""
        if self._ended is not None:
            self._ended.hold_back(self._callers)

    def take_back(self, output: Any) -> None:
        """The caller uses this structure, which is the replica's."""
        _record(output, self._callers)


def _record(obj: Any, stream: torch.Stream) -> None:
    for tensor in _tensors(obj, {}):
        for memory in memory_of(tensor):
            if memory.device == stream.device:
                memory.record_stream(stream)


def _tensors(obj: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """The tensors in a structure or a module; of values that are neither nothing is known."""
    if id(obj) in seen:
        return
    seen[id(obj)] = obj
    if isinstance(obj, Tensor):
        yield obj
        return
    parts: list[Any] = []
    if isinstance(obj, nn.Module):
        parts = [*chain(obj.parameters(), obj.buffers())]
    elif (container := container_of(obj)) is not None:
        parts = [value for _, value in container.children(obj)]
    elif batch_of(obj) is not None:
        parts = [*getattr(obj, "__dict__", {}).values()]
    for part in parts:
        yield from _tensors(part, seen)
