"""How a form splits the batches of its calls: by what the user gave as ``chunk_sizes``, or by a `Balancer`.

The options of a form have a `BatchSplit`. The engine asks it at each call, and ``prefetch`` asks for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.batches.chunk_sizes import BALANCED, ChunkSizes, Exact, Shares, checked, near_equal
from dataparallel.threads.balance import BalancedCall, Balancer
from dataparallel.threads.permits import kind_of_call, size_of


class BatchSplit:
    """The split of one form.

    Args:
        given: ints, floats, ``"balanced"`` or ``None``.
        slots: how many there are; 0 if there is no accelerator, and then nothing is split.

    Attributes:
        given: the argument; a sequence as a tuple, so that it is assigned and not changed.
        fixed: what splits every call alike; ``None`` for near-equal chunks, and if calls are balanced.

    Raises:
        TypeError, ValueError: as `chunk_sizes.checked`.
    """

    def __init__(self, given: ChunkSizes, slots: int) -> None:
        is_balanced = isinstance(given, str) and given == BALANCED
        self.fixed: Exact | Shares | None = None if is_balanced else checked(given, slots or None)
        self._balancer = Balancer() if is_balanced else None
        self.given: ChunkSizes = given if self.fixed is None else self.fixed.given
        self._slots = slots

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchSplit, (self.given, self._slots)

    def begin_call(
        self, module: Any, slots: Sequence[torch.device], inputs: Any, kwargs: Any, method: str = "forward"
    ) -> BalancedCall | None:
        """The split of a call with the arguments of a whole batch; ``None`` if calls are not balanced.

        `end_call` has to follow.
        """
        if self._balancer is None:
            return None
        kind = (method, kind_of_call(module, slots))
        return self._balancer.begin_call(type(module).__name__, kind, size_of(inputs, kwargs), slots)

    def end_call(self, call: BalancedCall | None, failed: bool) -> None:
        """Notes that the call has ended, or failed."""
        if self._balancer is not None and call is not None:
            self._balancer.end_call(call, failed)

    def sizes(self, total: int, slots: int) -> list[int]:
        """The sizes of the chunks that the next call will probably have of ``total`` samples.

        Raises:
            ValueError: the sizes that were given do not fit.
        """
        if self._balancer is None:
            return near_equal(total, slots, self.fixed)
        return self._balancer.next_sizes(total, slots)
