"""`joint` runs one collective for all replicas of a `JointSpan`: it gathers their tensors, and hands out the results.

The last replica to arrive computes for all, with nodes of the graph that span all devices, so that a backward reaches
all devices at once. The state of its thread must not matter: see `_Input`, `_hooks_disabled` and `_on_streams`. In a
checkpoint a `Tape` records the results: its recomputation runs on a thread of the engine, where no replica meets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.comm.streams.current import Event, current_streams, memory_of, streams_set
from dataparallel.replicas.graphs.kinds import CannotBeCaptured
from dataparallel.replicas.graphs.pieces import is_capturing
from dataparallel.threads.meetings import MeetingPlace, here

T = TypeVar("T")

_TORCH_CHECKPOINT = "torch.utils.checkpoint"


@_torch.not_traced
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    **kwargs: Any,
) -> T:
    """``function(*args, **kwargs)``, whose activations are computed again in backward in place of being kept.

    It is ``torch.utils.checkpoint.checkpoint`` without reentrance, for functions that call collectives of
    ``dataparallel.peers``. The results of collectives are kept, and the recomputation reads them in place of meeting
    other replicas. There `peers.index` and `peers.count` return what they returned in the forward. Without collectives,
    and outside of a parallel forward, it is torch's checkpoint.

    Args:
        function: has to compute the same when it is called again.
        args, kwargs: its arguments.
        preserve_rng_state, determinism_check: as in torch.

    Raises:
        RuntimeError: the recomputation calls other collectives than the forward. Also the errors of torch's checkpoint.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        tape = Tape()
        return tape.entered(), tape

    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        **kwargs,
    )


_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("dataparallel_tapes", default=())


class Tape:
    """The results of collectives in one checkpoint, in order, and the place of the replica that ran it.

    It is the context of a recomputation, which reads it from its beginning. There may be several recomputations.
    """

    def __init__(self) -> None:
        self.place: MeetingPlace | None = replayed_place() or here()
        self._entered_at: MeetingPlace | None = None  # the place of the thread that has entered the tape
        self.results: list[tuple[Request, list[Tensor]]] = []
        self._next: int | None = None  # the position of the recomputation; None while recording
        self._recomputations: list[ExitStack] = []

    @property
    def is_replayed(self) -> bool:
        return self._next is not None

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.callback(setattr, self, "_next", self._next)
        stack.enter_context(self.entered())
        self._recomputations.append(stack)
        self._next = 0

    def __exit__(self, *error: object) -> None:
        self._recomputations.pop().close()

    @property
    def is_active(self) -> bool:
        """True in the replica that has entered the tape. False in the replicas of a parallel call inside of it."""
        return here() is self._entered_at

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._entered_at = here()
        token = _tapes.set((*_tapes.get(), self))
        try:
            yield
        finally:
            _tapes.reset(token)

    def read(self, request: Request) -> list[Tensor]:
        """The results that the forward had at this point."""
        assert self._next is not None
        recorded = self.results[self._next] if self._next < len(self.results) else (None, [])
        if recorded[0] != request:
            raise RuntimeError(
                f"a recomputation calls {request}, where its forward has called {recorded[0] or 'no collective'}: a "
                "checkpointed function has to do the same in both"
            )
        self._next += 1
        return _leaves(recorded[1])


def _leaves(results: Sequence[Tensor]) -> list[Tensor]:
    """Leaves on the same memory. They need gradients as the results do, so a recomputation saves the same tensors."""
    return [result.detach().requires_grad_(result.requires_grad) for result in results]


def _active_tapes() -> list[Tape]:
    return [tape for tape in _tapes.get() if tape.is_active]


def _replayed_tape() -> Tape | None:
    return next((tape for tape in reversed(_active_tapes()) if tape.is_replayed), None)


def note_results(request: Request, results: Sequence[Tensor]) -> None:
    for tape in _active_tapes():
        if not tape.is_replayed:
            tape.results.append((request, _leaves(results)))


def results_of_forward(request: Request) -> list[Tensor] | None:
    """What the collective returned in the forward; ``None`` if this is no recomputation."""
    tape = _replayed_tape()
    if tape is None:
        return None
    results = tape.read(request)
    note_results(request, results)  # a checkpoint inside of this one records anew
    return results


def replayed_place() -> MeetingPlace | None:
    """The place of the replica whose forward is recomputed here; ``None`` if this is no recomputation."""
    tape = _replayed_tape()
    return None if tape is None else tape.place


def check_checkpoints(place: MeetingPlace) -> None:
    """Checks, before a meeting, that a checkpoint around the collective can recompute it.

    A checkpoint around the whole parallel call recomputes the call with its meetings. So only checkpoints matter that
    have begun inside of ``forward``: they show by other saved-tensor hooks, or by gradients that are off. torch's own
    cannot recompute a collective.
    """
    if _active_tapes():
        return
    hooks = _torch.top_saved_tensors_hooks(True)
    has_new_hooks = hooks is not None and hooks != place.meeting.hooks and hooks[0].__module__ == _TORCH_CHECKPOINT
    is_reentrant = place.meeting.records and not torch.is_grad_enabled() and _is_called_by(_TORCH_CHECKPOINT)
    if has_new_hooks or is_reentrant:
        raise RuntimeError(
            "a collective inside of torch.utils.checkpoint.checkpoint cannot be computed again: that happens in "
            "backward, where no replica can be met; use dataparallel.peers.checkpoint, which keeps what collectives "
            "returned"
        )


def _is_called_by(module: str) -> bool:
    """True if a function of ``module`` is among the callers. Only a reentrant checkpoint leaves no other trace."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class JointSpan:
    """The replicas of a collective, seen from the one with number ``index``. ``counts``: how many each machine has."""

    place: MeetingPlace
    index: int
    counts: tuple[int, ...]
    rank: int = 0
    peer_call: Any = None

    @property
    def count(self) -> int:
        return sum(self.counts)


def span_of_caller(across_machines: bool = False) -> JointSpan | None:
    """The span of a collective that the calling replica begins; ``None`` if there is only one replica.

    The first call with ``across_machines`` in a forward is a collective itself: all replicas on all machines make it.
    """
    across_machines = checked("across_machines", across_machines, bool)
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
class Request:
    """``detail``: the function's other arguments, as a call would write them. ``tensors``: what `described` says."""

    name: str
    detail: str = ""
    tensors: tuple[str, ...] = ()
    inference: bool = False
    across_machines: bool = False

    def __str__(self) -> str:
        of = f" of {', '.join(self.tensors)}" if self.tensors else ""
        where = " across machines" if self.across_machines else ""
        return f"{self.name}({self.detail}){of}{where}{' in inference mode' if self.inference else ''}"


def described(tensors: Sequence[Tensor], free_dim: int | None = None) -> tuple[str, ...]:
    """The dtype and shape that each tensor must have in all replicas. Sizes along ``free_dim`` may differ."""
    texts = []
    for tensor in tensors:
        sizes = [*map(str, tensor.shape)]
        if free_dim is not None:
            sizes[free_dim] = "any"
        texts.append(f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")
    return tuple(texts)


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
    """``note``: a value of this replica that is no tensor, because the host has to know it."""
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
    results: list[Tensor] = place.meet(request, _Input(tensors, device, note), partial(_compute, combine=combine))
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
        if one.stream is not None and one.stream != streams[one.device]:
            _record_use(own, one.device, one.stream)
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
        _record_use(one.tensors, one.device, streams[one.device])
    with streams_set(streams):
        yield
    for one, stream in others:
        Event(streams[one.device]).make_wait(stream)


def _record_use(tensors: Sequence[Tensor], device: torch.device, stream: torch.Stream) -> None:
    """Tells the allocator that another stream than that of its allocation uses the tensors' memory on the device."""
    for memory in chain.from_iterable(map(memory_of, tensors)):
        if memory.device == device:
            memory.record_stream(stream)
