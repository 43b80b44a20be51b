"""What slots bring when a unit's gradients are added, and what all units of a tree share in one pass of backward.

``units.gradients`` makes deliveries, ``units.sums`` adds them, and ``units.passes`` ends the pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.sharded.tensor import ShardedTensor, divided_like, is_divided_alike
from dataparallel.sharded.units.layout import Layout
from dataparallel.sharded.units.streams import wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.sums_over_machines import SumsOverMachines


class Summed:
    """The parameters of all units of a tree that have got gradients in one pass."""

    def __init__(self) -> None:
        self._parameters: dict[int, ShardedTensor] = {}
        self._apart: dict[int, ShardedTensor] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def note(self, parameters: Iterable[ShardedTensor]) -> None:
        """These have got gradients."""
        self._parameters.update((id(parameter), parameter) for parameter in parameters)

    def gradient_of(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """What a sum of this pass is added to, if there is one."""
        return self._apart.get(id(parameter)) if _torch.hooks_of(parameter) else parameter.grad

    def set_gradient(self, parameter: ShardedTensor, gradient: ShardedTensor) -> None:
        """Makes the first sum what later ones are added to."""
        if _torch.hooks_of(parameter):
            self._apart[id(parameter)] = gradient
        else:
            parameter.grad = gradient

    @torch.no_grad()
    def run_hooks(self) -> None:
        """Runs the hooks of all these parameters, on the current streams, which have waited for the sums.

        Raises:
            TypeError, ValueError: a hook has returned something that cannot take the place of the gradient.
        """
        for parameter in self._parameters.values():
            gradient = self._apart.pop(id(parameter), None)
            if gradient is not None:
                _accumulate(parameter, _hooked(parameter, gradient))
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)


def _hooked(parameter: ShardedTensor, gradient: ShardedTensor) -> ShardedTensor:
    """What the parameter's hooks make of its gradient."""
    for hook in [*(_torch.hooks_of(parameter) or {}).values()]:
        returned = hook(gradient)
        if returned is None:
            continue
        if not isinstance(returned, Tensor):
            raise TypeError(
                f"a hook on a parameter returns a tensor or None; {hook!r} returned {type(returned).__name__}"
            )
        if returned.dtype != gradient.dtype or returned.shape != gradient.shape:
            raise ValueError(
                f"a hook on a parameter was given a gradient of shape {tuple(gradient.shape)} and {gradient.dtype}, "
                f"and has to return one; {hook!r} returned one of shape {tuple(returned.shape)} and {returned.dtype}"
            )
        gradient = returned if is_divided_alike(returned, gradient) else divided_like(returned, gradient)  # type: ignore[assignment]
    return gradient


def _accumulate(parameter: ShardedTensor, gradient: ShardedTensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


Group: TypeAlias = "tuple[list[int], Layout, torch.dtype]"
"""Parameters of one dtype that need gradients: their positions in the unit, their layout, the dtype."""


@dataclass
class Delivery:
    """What one slot brings for one unit.

    Attributes:
        matrices: for each dtype the gradients in the layout of the gathered matrix, with a row for each owner on this
            machine: over machines it has the owner's parts on all of them.
        sums: for each dtype memory on the slot's device for its part of the sum.
        parts: the same in the dtype of the parameters, which may be the same memory. Not used over machines.
        present: which of the parameters that need gradients have one.
        made: after the writes to all of this, on the slot's computing stream. ``None`` on the CPU.
    """

    matrices: list[Tensor]
    sums: list[Tensor]
    parts: list[Tensor]
    present: list[bool]
    made: Event | None


@dataclass
class SumsOfPass:
    """What all units of a tree share in one pass of backward.

    Attributes:
        slots: how many replicas take part.
        computing: the computing stream of each accelerator: those of the forward.
        callers: the streams that were current where ``backward()`` was called, which may be others.
        in_flight: for each slot the deliveries whose sums have been launched, with events after they were read.
        added: for each owner an event after its last sum.
        waiting: what is added to gradients on the host when these events have passed.
        summed: the parameters that have got gradients, and their hooks.
        added_to: gradients of earlier passes that the sums are added to: others may drop them meanwhile.
        latest: after all sums, and their reads.
        over_machines: adds up over machines what slots have added up.
        put_back: for a unit and a slot (their ``id`` and number) what leaves gradients of earlier passes on the slot
            again, if the pass fails. They are part of deliveries that have not been added up.
    """

    slots: int
    computing: Mapping[torch.device, torch.Stream]
    in_flight: dict[int, list[tuple[Delivery, list[Event]]]] = field(default_factory=dict)
    added: dict[int, Event] = field(default_factory=dict)
    waiting: list[Callable[[], object]] = field(default_factory=list)
    summed: Summed = field(default_factory=Summed)
    latest: Event | None = None
    added_to: list[Tensor] = field(default_factory=list)
    put_back: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    over_machines: SumsOverMachines | None = None
    callers: set[torch.Stream] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, slot: int, delivery: Delivery, events: list[Event]) -> None:
        """Keeps a delivery until `release`, which waits for the events."""
        with self._lock:
            self.in_flight.setdefault(slot, []).append((delivery, events))

    def release(self, slot: int) -> None:
        """Makes the slot's computing stream wait for the sums that read its deliveries, and drops these."""
        with self._lock:
            deliveries = self.in_flight.pop(slot, [])
        for delivery, events in deliveries:
            device = (delivery.matrices or delivery.sums)[0].device
            if device in self.computing:
                wait_for(events, [self.computing[device]])

    def drop(self) -> None:
        """Drops everything, in order with what reads it. The pass has failed."""
        wait_for([] if self.latest is None else [self.latest], self.computing.values())
        if self.over_machines is not None:
            self.over_machines.fail(RuntimeError("its backward has failed, with an error that is shown there"))
        self.in_flight.clear()
        self.waiting.clear()
        self.added_to.clear()
        while self.put_back:
            self.put_back.popitem()[1]()

    def note_callers(self) -> None:
        """Called when a task of the engine ends, which has made the streams current where ``backward()`` was called."""
        self.callers.update(current_streams(self.computing).values())

    def make_callers_wait(self) -> None:
        """Orders the callers' streams, and those that are current, after the computing streams.

        Other code uses gradients there, and an optimizer writes to the shards that pulls have read.
        """
        self.note_callers()
        for device, computing in self.computing.items():
            others = [stream for stream in self.callers if stream.device == device and stream != computing]
            if others:
                wait_for([Event(computing)], others)

    def end(self) -> None:
        """Orders all computing streams and callers' after all sums, and finishes gradients on the host."""
        wait_for([] if self.latest is None else [self.latest], self.computing.values())
        self.in_flight.clear()  # the event is behind the sums that read them
        self.added_to.clear()
        if self.over_machines is not None:
            self.over_machines.finish(self.summed)
        if self.waiting:
            for event in self.added.values():
                event.synchronize()
            for finish in self.waiting:
                finish()
        self.put_back.clear()
        self.make_callers_wait()
        # Hooks may use the gradients on the current streams, which wait for the sums now.
        self.summed.run_hooks()


def added_in(summed: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum: sums of 16-bit numbers are made in 32 bits."""
    wide = torch.promote_types(summed, dtype)
    return torch.float32 if wide.itemsize < 4 and wide.is_floating_point else wide
