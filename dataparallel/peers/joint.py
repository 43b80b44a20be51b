"""`joint` runs one collective for all replicas of a `JointSpan`: it gathers their tensors, and hands out the results.

The last replica to arrive computes for all, with nodes of the graph that span all devices, so that a backward reaches
all devices at once. The state of its thread must not matter: see `_Input`, `_hooks_disabled` and `_on_streams`.
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
from dataparallel.replicas.graphs.captured import CannotBeCaptured
from dataparallel.replicas.graphs.pieces import is_capturing
from dataparallel.threads.meetings import MeetingPlace, here


@dataclass(frozen=True)
class JointSpan:
    """The replicas of a collective, seen from one of them.

    Attributes:
        place: the replica's place in the call of its own machine.
        index: the replica's number among all replicas, machine by machine.
        counts: how many replicas each machine has.
        rank: the number of the replica's machine.
        peer_call: a ``machines.peer_rounds.PeerCall`` if the collective spans several machines.
    """

    place: MeetingPlace
    index: int
    counts: tuple[int, ...]
    rank: int = 0
    peer_call: Any = None

    @property
    def count(self) -> int:
        """How many replicas take part."""
        return sum(self.counts)


def span_of_caller(across_machines: bool = False) -> JointSpan | None:
    """The span of a collective that the calling replica begins; ``None`` if there is only one replica.

    The first call with ``across_machines`` in a forward is a collective itself: all replicas on all machines make it.
    """
    place = replayed_place() or here()
    if place is None:
        return None
    if is_capturing():
        raise CannotBeCaptured("a collective between replicas waits for the others, which are not captured meanwhile")
    if across_machines and place.meeting.machines is not None and place.meeting.machines.size > 1:
        return _across(place, place.meeting.machines)
    return None if place.count == 1 else JointSpan(place, place.index, (place.count,))


def _across(place: MeetingPlace, peer_call: Any) -> JointSpan:
    if peer_call.counts is None:

        def begin(values: list[Any]) -> list[Any]:
            peer_call.exchange_counts(place.count)
            return values

        place.meet("the first collective across machines", None, begin)
    counts, rank = tuple(peer_call.counts), peer_call.rank
    return JointSpan(place, sum(counts[:rank]) + place.index, counts, rank, peer_call)


@_torch.not_traced
def index(across_machines: bool = False) -> int:
    """The number of the replica that is running, in slot order; 0 outside of a parallel forward.

    Args:
        across_machines: count the replicas of all machines, machine by machine in rank order. Then all replicas have to
            call this, because the machines exchange how many replicas they have.
    """
    span = span_of_caller(across_machines)
    return 0 if span is None else span.index


@_torch.not_traced
def count(across_machines: bool = False) -> int:
    """How many replicas the running call has; 1 outside of a parallel forward.

    Args:
        across_machines: count the replicas of all machines, as for `index`.
    """
    span = span_of_caller(across_machines)
    return 1 if span is None else span.count


Combine: TypeAlias = Callable[[Sequence[torch.device], list[list[Tensor]], list[Any]], list[list[Tensor]]]
"""``combine(devices, tensors, notes)``, each by replica, returns each replica's results, in memory of their own."""


@dataclass(frozen=True)
class _CollectiveSignature:
    """The dtype and shape that a tensor must have in all replicas. A size that may differ is ``None``."""

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
        detail: the function's other arguments, as a call would write them.
        tensors: the signature of each tensor.
        across_machines: true if the replicas of other machines take part.
        inference: true in inference mode. All replicas have to be in it, or none.
    """

    name: str
    detail: str = ""
    tensors: tuple[_CollectiveSignature, ...] = ()
    inference: bool = False
    across_machines: bool = False

    def __str__(self) -> str:
        of = f" of {', '.join(map(str, self.tensors))}" if self.tensors else ""
        where = " across machines" if self.across_machines else ""
        return f"{self.name}({self.detail}){of}{where}{' in inference mode' if self.inference else ''}"


def described(tensors: Sequence[Tensor], free_dim: int | None = None) -> tuple[_CollectiveSignature, ...]:
    """The signatures of ``tensors``; sizes along ``free_dim`` may differ."""
    signatures = []
    for tensor in tensors:
        shape: list[int | None] = [*tensor.shape]
        if free_dim is not None:
            shape[free_dim] = None
        signatures.append(_CollectiveSignature(tensor.dtype, tuple(shape)))
    return tuple(signatures)


class _Input:
    """A replica's tensors, and its thread's grad mode and current stream.

    The collective records gradients if any replica does. A replica that does not contributes tensors without a graph,
    and gets results without a graph.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, note: Any) -> None:
        self.note = note
        self.records = torch.is_grad_enabled()
        self.tensors = list(tensors) if self.records else [tensor.detach() for tensor in tensors]
        self.device = device
        self.stream = current_streams([device]).get(device)


def joint(
    place: MeetingPlace, request: Request, tensors: Sequence[Tensor], combine: Combine, note: Any = None
) -> list[Tensor]:
    """Runs a collective and returns this replica's results. All replicas have to call it with an equal request.

    ``note``: a value of this replica that is no tensor, because the host has to know it.

    Raises:
        ValueError: a tensor is not on the replica's device.
        RuntimeError: as `Place.meet`; the call is inside a checkpoint of torch.
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

    def of_all(inputs: list[_Input]) -> list[list[Tensor]]:
        return _compute(inputs, combine)

    results: list[Tensor] = place.meet(request, _Input(tensors, device, note), of_all)
    note_results(request, results)
    return results


def _compute(inputs: list[_Input], combine: Combine) -> list[list[Tensor]]:
    records = any(one.records for one in inputs)
    streams = {one.device: one.stream for one in reversed(inputs) if one.stream is not None}  # the first of each device
    with torch.set_grad_enabled(records), _hooks_disabled(), _on_streams(inputs, streams):
        devices, tensors = [one.device for one in inputs], [one.tensors for one in inputs]
        results = combine(devices, tensors, [one.note for one in inputs])
    for one, own in zip(inputs, results, strict=True):
        if not one.records:
            own[:] = [result.detach() for result in own]
        _record_use(one, own, streams)
    return results


def _hooks_disabled() -> AbstractContextManager[object]:
    """Disables saved-tensor hooks. They belong to one replica, and need not see what the nodes here save."""
    if _torch.top_saved_tensors_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # torch calls only the innermost pair


@contextmanager
def _on_streams(inputs: Sequence[_Input], streams: dict[torch.device, torch.Stream]) -> Iterator[None]:
    """Makes ``streams``, one for each device, current, and orders the collective there with the replicas' own streams.

    A replica whose stream is not among them may share a device with one whose stream is. An event orders the collective
    after what it has launched, and a second one orders what it launches next after the collective.
    """
    others = [(one, one.stream) for one in inputs if one.stream is not None and one.stream != streams[one.device]]
    for one, stream in others:
        Event(stream).make_wait(streams[one.device])
        for tensor in one.tensors:
            for memory in memory_of(tensor):
                memory.record_stream(streams[one.device])
    with streams_set(streams):
        yield
    for one, stream in others:
        Event(streams[one.device]).make_wait(stream)


def _record_use(one: _Input, results: Sequence[Tensor], streams: dict[torch.device, torch.Stream]) -> None:
    """Tells the allocator that a replica's stream uses results, whose memory belongs to the stream in ``streams``."""
    if one.stream is None or one.stream == streams[one.device]:
        return
    for result in results:
        for memory in memory_of(result):
            if memory.device == one.device:
                memory.record_stream(one.stream)
