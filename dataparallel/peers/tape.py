"""Tapes: what collectives returned inside a checkpoint, for its recomputation.

A recomputation runs in backward, often on a thread of the engine, where no replica runs and nobody can be met. So
``peers.checkpoint`` writes the results of collectives on a `Tape`, and its recomputation reads them there. ``joint``
asks for the tapes of its thread. Checkpoints may be nested, so there may be several. A parallel call inside of a
checkpoint has nothing to do with its tape: replicas meet in the recomputation too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from dataparallel.peers.requests import Request
from dataparallel.threads.meetings import Place, here

__all__ = ["Tape", "read_or_none", "recording", "replayed_place", "write"]

_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("dataparallel_tapes", default=())


class Tape:
    """The results of collectives in one checkpoint, in order, and the place of the replica that ran it."""

    def __init__(self) -> None:
        self.place: Place | None = replayed_place() or here()
        self._around: Place | None = None  # the place of the thread that has entered it
        self._results: list[tuple[Request, list[Tensor]]] = []
        self._next: int | None = None  # the position of the recomputation; None while recording

    @property
    def is_replayed(self) -> bool:
        """True inside of the recomputation."""
        return self._next is not None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the forward."""
        with self._active():
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Around a recomputation. There may be several, each from the beginning."""
        before, self._next = self._next, 0
        try:
            with self._active():
                yield
        finally:
            self._next = before

    @property
    def is_active(self) -> bool:
        """True in the replica that has entered it, and not in those of a parallel call inside."""
        return here() is self._around

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._around = here()
        token = _tapes.set((*_tapes.get(), self))
        try:
            yield
        finally:
            _tapes.reset(token)

    def write(self, request: Request, results: Sequence[Tensor]) -> None:
        """Notes the results of a collective, without their graphs."""
        self._results.append((request, [_leaf(result, result.requires_grad) for result in results]))

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
        return [_leaf(result, result.requires_grad) for result in recorded[1]]


def _leaf(result: Tensor, needs_grad: bool) -> Tensor:
    """The same memory as a leaf of a graph. A recomputation saves the same tensors if the same ones need gradients."""
    return result.detach().requires_grad_(needs_grad)


def _active_tapes() -> list[Tape]:
    """The tapes of this thread, the innermost last."""
    return [tape for tape in _tapes.get() if tape.is_active]


def recording() -> bool:
    """True inside of a checkpoint that replays what its collectives return."""
    return bool(_active_tapes())


def write(request: Request, results: Sequence[Tensor]) -> None:
    """Notes the results of a collective on the tapes that record."""
    for tape in _active_tapes():
        if not tape.is_replayed:
            tape.write(request, results)


def read_or_none(request: Request) -> list[Tensor] | None:
    """What the collective returned in the forward; ``None`` if this is no recomputation."""
    for tape in reversed(_active_tapes()):
        if tape.is_replayed:
            results = tape.read(request)
            write(request, results)  # a checkpoint inside of this one records anew
            return results
    return None


def replayed_place() -> Place | None:
    """The place of the replica whose forward is recomputed here; ``None`` if this is no recomputation."""
    return next((tape.place for tape in reversed(_active_tapes()) if tape.is_replayed), None)
