"""Which replicas a collective spans (`Span`), and how `joint` brings their tensors together and hands out the results.

The last replica that comes computes for all, with nodes of the graph that span all devices, so that a backward reaches
every device at once. What is current in its thread must not matter: see `_Brought`, `_hooks_passed_by`, `_in_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dataparallel import _torch
from dataparallel.comm.streams.current import Event, current_streams, memory_of, streams_set
from dataparallel.peers.checkpoint import check_checkpoints, note_results, replayed_place, results_of_forward
from dataparallel.threads.meetings import Place, here


@dataclass(frozen=True)
class Span:
    """The replicas of a collective, seen from one of them.

    Attributes:
        place: of the replica, in the call of its own machine.
        index: its number among all of them, machine by machine.
        counts: how many replicas each machine has.
        rank: the number of its machine.
        machines: a ``machines.peer_rounds.PeerCall`` if there are several.
    """

    place: Place
    index: int
    counts: tuple[int, ...]
    rank: int = 0
    machines: Any = None

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return sum(self.counts)


def span_of_caller(across_machines: bool = False) -> Span | None:
    """The span of a collective of the replica that runs here; ``None`` if there is only one replica.

    The first time that a forward asks across machines, all of its replicas on all machines have to ask.
    """
    place = replayed_place() or here()
    if place is None:
        return None
    if across_machines and place.meeting.machines is not None and place.meeting.machines.size > 1:
        return _across(place, place.meeting.machines)
    return None if place.count == 1 else Span(place, place.index, (place.count,))


def _across(place: Place, machines: Any) -> Span:
    if machines.counts is None:

        def begin(values: list[Any]) -> list[Any]:
            machines.exchange_counts(place.count)
            return values

        place.meet("the first collective across machines", None, begin)
    counts, rank = tuple(machines.counts), machines.rank
    return Span(place, sum(counts[:rank]) + place.index, counts, rank, machines)


@_torch.not_traced
def index(across_machines: bool = False) -> int:
    """The number of the replica that is running, in slot order; 0 outside of a parallel forward.

    Args:
        across_machines: among the replicas of all machines, machine by machine in the order of their ranks. All
            replicas have to ask then: the machines tell each other how many they have.
    """
    span = span_of_caller(across_machines)
    return 0 if span is None else span.index


@_torch.not_traced
def count(across_machines: bool = False) -> int:
    """How many replicas the running call has; 1 outside of a parallel forward.

    Args:
        across_machines: on all machines, as for `index`.
    """
    span = span_of_caller(across_machines)
    return 1 if span is None else span.count


Together: TypeAlias = Callable[[Sequence[torch.device], list[list[Tensor]], list[Any]], list[list[Tensor]]]
"""``function(devices, tensors of each replica, its notes)`` returns each replica's results, in memory of their own."""


@dataclass(frozen=True)
class _Described:
    """What has to agree of a tensor. A size is ``None`` where it may differ between replicas."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True)
class Request:
    """One collective, as error messages name it.

    Attributes:
        name: the function's name.
        detail: its other arguments, as they are written.
        tensors: what has to agree of each tensor.
        across_machines: true if the replicas of other machines take part.
        inference: true if it is called in inference mode, which all replicas have to be in, or none.
    """

    name: str
    detail: str = ""
    tensors: tuple[_Described, ...] = ()
    inference: bool = False
    across_machines: bool = False

    def __str__(self) -> str:
        of = f" of {', '.join(map(str, self.tensors))}" if self.tensors else ""
        where = " across machines" if self.across_machines else ""
        return f"{self.name}({self.detail}){of}{where}{' in inference mode' if self.inference else ''}"


def described(tensors: Sequence[Tensor], free_dim: int | None = None) -> tuple[_Described, ...]:
    """What has to agree of each of ``tensors``; sizes along ``free_dim`` may differ."""
    found = []
    for tensor in tensors:
        shape: list[int | None] = [*tensor.shape]
        if free_dim is not None:
            shape[free_dim] = None
        found.append(_Described(tensor.dtype, tuple(shape)))
    return tuple(found)


class _Brought:
    """What a replica brings: its tensors, and what is current in its thread.

    Gradients are on in the collective if any replica has them on. One that has them off brings tensors without a graph,
    and gets results without one.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, note: Any) -> None:
        self.note = note
        self.records = torch.is_grad_enabled()
        self.tensors = list(tensors) if self.records else [tensor.detach() for tensor in tensors]
        self.device = device
        self.stream = current_streams([device]).get(device)


def joint(
    place: Place, request: Request, tensors: Sequence[Tensor], together: Together, note: Any = None
) -> list[Tensor]:
    """The results of this replica. All replicas have to call it with an equal request.

    ``note``: what this replica brings that is no tensor, and that the host has to know.

    Raises:
        ValueError: a tensor is not on the replica's device.
        RuntimeError: see `Place.meet`; a checkpoint of torch is around it.
    """
    replayed = results_of_forward(request)
    if replayed is not None:
        return replayed
    device = place.meeting.devices[place.index]
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                f"{request}: a tensor is on {tensor.device}, and replica {place.index} runs on {device}; bring tensors "
                "of the replica's device"
            )
    check_checkpoints(place)

    def of_all(brought: list[_Brought]) -> list[list[Tensor]]:
        return _compute(brought, together)

    results: list[Tensor] = place.meet(request, _Brought(tensors, device, note), of_all)
    note_results(request, results)
    return results


def _compute(brought: list[_Brought], together: Together) -> list[list[Tensor]]:
    records = any(one.records for one in brought)
    first = {one.device: one.stream for one in reversed(brought) if one.stream is not None}  # of each device
    with torch.set_grad_enabled(records), _hooks_passed_by(), _in_order(brought, first):
        devices, tensors = [one.device for one in brought], [one.tensors for one in brought]
        results = together(devices, tensors, [one.note for one in brought])
    for one, own in zip(brought, results, strict=True):
        if not one.records:
            own[:] = [result.detach() for result in own]
        _record_use(one, own, first)
    return results


def _hooks_passed_by() -> AbstractContextManager[object]:
    """Saved-tensor hooks are those of a replica. The nodes here save nothing that matters to them."""
    if _torch.top_saved_tensors_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # torch calls the innermost pair only


@contextmanager
def _in_order(brought: Sequence[_Brought], first: dict[torch.device, torch.Stream]) -> Iterator[None]:
    """Makes the first replica's stream of each device current, in order with those of the device's other replicas.

    A replica launches what follows on its own stream. If that is the device's first one, it comes after the collective
    there anyway. Otherwise an event at the beginning orders the collective after what the replica has launched, and one
    at the end orders what the replica launches next after the collective.
    """
    others = [(one, one.stream) for one in brought if one.stream is not None and one.stream != first[one.device]]
    for one, stream in others:
        Event(stream).make_wait(first[one.device])
        for tensor in one.tensors:
            for memory in memory_of(tensor):
                memory.record_stream(first[one.device])
    with streams_set(first):
        yield
    for one, stream in others:
        Event(first[one.device]).make_wait(stream)


def _record_use(one: _Brought, results: Sequence[Tensor], first: dict[torch.device, torch.Stream]) -> None:
    """Results are memory of the device's first stream. Another stream that uses them is named to the allocator."""
    if one.stream is None or one.stream == first[one.device]:
        return
    for result in results:
        for memory in memory_of(result):
            if memory.device == one.device:
                memory.record_stream(one.stream)
