"""How a form splits the batches of its calls: by what the user gave as ``chunk_sizes``, or by a `Balancer`.

The forms hold a `BatchSplit` and enter `of_call` around the stages of a call. Their scatter is handed this object, and
``prefetch`` asks it. It moves nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dataparallel.chunk_sizes import BALANCED, ChunkSizes, checked, near_equal
from dataparallel.threads.balance import BalancedCall, Balancer
from dataparallel.threads.permits import kind_of_call, size_of

__all__ = ["BatchSplit"]


class BatchSplit:
    """The split of one form.

    Args:
        given: ints, floats, ``"balanced"`` or ``None``.
        slots: how many there are; 0 if there is no accelerator, and then nothing is split.

    Attributes:
        given: the argument; a sequence as a tuple, so that it is assigned and not changed.

    Raises:
        TypeError, ValueError: as `chunk_sizes.checked`.
    """

    def __init__(self, given: ChunkSizes, slots: int) -> None:
        is_balanced = isinstance(given, str) and given == BALANCED
        self._fixed = None if is_balanced else checked(given, slots or None)
        self._balancer = Balancer() if is_balanced else None
        self.given: ChunkSizes = given if self._fixed is None else self._fixed.given
        self._slots = slots
        self._now = threading.local()  # ``call``: the call that this thread makes

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchSplit, (self.given, self._slots)

    @property
    def call(self) -> BalancedCall | None:
        """The call that this thread makes, if it is balanced."""
        return getattr(self._now, "call", None)

    def of_call(
        self, module: Any, slots: Sequence[torch.device], inputs: Any, kwargs: Any, method: str = "forward"
    ) -> AbstractContextManager[None]:
        """Around the stages of a call of ``module`` or its method, with the arguments of the whole batch."""
        if self._balancer is None:
            return nullcontext()
        kind, size = (method, kind_of_call(module, slots)), size_of(inputs, kwargs)
        return _Balanced(self._balancer, self._now, (type(module).__name__, kind, size, slots))

    def sizes(self, total: int, slots: int) -> list[int]:
        """The sizes of the chunks of ``total`` samples; outside of a call those that the next call will probably have.

        Raises:
            ValueError: the sizes that were given do not fit.
        """
        if self._balancer is None:
            return near_equal(total, slots, self._fixed)
        call = self.call
        return self._balancer.next_sizes(total, slots) if call is None else call.sizes(total, slots)


class _Balanced:
    """A call that is balanced. No generator: contextlib assigns to the exception of a block, which some refuse."""

    def __init__(self, balancer: Balancer, now: threading.local, arguments: tuple[Any, ...]) -> None:
        self._balancer, self._now, self._arguments = balancer, now, arguments

    def __enter__(self) -> None:
        self._outer = getattr(self._now, "call", None)
        self._call = self._now.call = self._balancer.begin(*self._arguments)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._now.call = self._outer
        self._balancer.end(self._call, kind is not None)
