"""`checkpoint`: recomputation in backward for functions that call collectives.

A recomputation often runs on a thread of autograd's engine, where no replica runs, so replicas cannot meet there. So a
`Tape` records the results of collectives, and the recomputation reads them. Nested checkpoints have a tape each. The
replicas of a parallel call inside of a checkpoint meet again in the recomputation, and do not use its tape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from dataparallel import _torch
from dataparallel.threads.meetings import MeetingPlace, here

if TYPE_CHECKING:
    from dataparallel.peers.joint import Request

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
        return tape.entered(), _Replayed(tape)

    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        **kwargs,
    )


class _Replayed:
    """The context of recomputations. torch enters it once for each of them."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._tape.replayed()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("dataparallel_tapes", default=())


class Tape:
    """The results of collectives in one checkpoint, in order, and the place of the replica that ran it."""

    def __init__(self) -> None:
        self.place: MeetingPlace | None = replayed_place() or here()
        self._entered_at: MeetingPlace | None = None  # the place of the thread that has entered the tape
        self._results: list[tuple[Request, list[Tensor]]] = []
        self._next: int | None = None  # the position of the recomputation; None while recording

    @property
    def is_replayed(self) -> bool:
        """True inside of the recomputation."""
        return self._next is not None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Wraps a recomputation, which reads the tape from its beginning. There may be several recomputations."""
        before, self._next = self._next, 0
        try:
            with self.entered():
                yield
        finally:
            self._next = before

    @property
    def is_active(self) -> bool:
        """True in the replica that has entered the tape. False in the replicas of a parallel call inside of it."""
        return here() is self._entered_at

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Wraps the forward."""
        self._entered_at = here()
        token = _tapes.set((*_tapes.get(), self))
        try:
            yield
        finally:
            _tapes.reset(token)

    def write(self, request: Request, results: Sequence[Tensor]) -> None:
        """Notes the results of a collective, without their graphs."""
        self._results.append((request, _leaves(results)))

    def read(self, request: Request) -> list[Tensor]:
        """The results that the forward had at this point.

        Raises:
            RuntimeError: the forward called another collective here.
        """
        assert self._next is not None
        recorded = self._results[self._next] if self._next < len(self._results) else (None, [])
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
    """The tapes of this thread, the innermost last."""
    return [tape for tape in _tapes.get() if tape.is_active]


def _replayed_tape() -> Tape | None:
    return next((tape for tape in reversed(_active_tapes()) if tape.is_replayed), None)


def note_results(request: Request, results: Sequence[Tensor]) -> None:
    """Notes the results of a collective on the tapes that record."""
    for tape in _active_tapes():
        if not tape.is_replayed:
            tape.write(request, results)


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
    have begun inside of ``forward``: they show by other saved-tensor hooks, or by gradients that are off.

    Raises:
        RuntimeError: the checkpoint is torch's, which cannot recompute a collective.
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
