"""Which replica runs here, and what its collectives span: the replicas of one machine, or those of all machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataparallel import _torch
from dataparallel.peers.checkpoint import replayed_place
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
