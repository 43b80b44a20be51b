"""`fall_back` and `split_where_sizes_differ`: torch's rules where the library promises more, and `counts` of calls.

Only ``torch_wrapper`` and ``replacement`` use them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dataparallel.batches.batch_types import PerReplica
from dataparallel.batches.structures import is_whole, leaves, with_leaves
from dataparallel.comm.checks import near_equal_sizes
from dataparallel.user_warnings import warn_user


class FallbackCounts:
    """How often each name was called, and what has fallen back to torch's rule. Threads may call at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self.before_call: Callable[[str, int], object] | None = None  # gets the name and the number of each call

    def note_call(self, name: str) -> None:
        """Counts a call that begins."""
        with self._lock:
            self._calls[name] += 1
            number = self._calls[name]
        if self.before_call is not None:
            self.before_call(name, number)

    def note_fallback(self, rule: str) -> bool:
        """Counts a call that follows a rule of torch. Returns true the first time."""
        with self._lock:
            self._fallbacks[rule] += 1
            return self._fallbacks[rule] == 1

    def calls(self) -> dict[str, int]:
        """Returns how often each name was called."""
        with self._lock:
            return dict(self._calls)

    def fallbacks(self) -> dict[str, int]:
        """Returns how often each rule of torch was followed."""
        with self._lock:
            return dict(self._fallbacks)


counts = FallbackCounts()
"""Of this process."""


def fall_back(rule: str, reason: str) -> None:
    """Counts a call that follows a rule of torch, and warns of the first one with the reason."""
    if counts.note_fallback(rule):
        warn_user(f"as torch.nn.DataParallel does, {rule}: {reason}")


def split_where_sizes_differ(arguments: Any, dim: int, slots: int) -> Any:
    """Splits each tensor by itself where batch sizes differ, as torch does. All have chunks for the replicas that run.

    torch drops the chunks that are left. A warning says so, unless they are entries of a tensor that has one equal
    entry for each slot: ``Trainer`` of transformers passes a count in that way, and its last batch may be small.

    Args:
        arguments: any structure. It is returned as it is if ``slots`` is 0, or if batch sizes agree.
    """
    if not slots:
        return arguments
    found = [
        leaf
        for _, leaf in leaves(arguments, "")
        if isinstance(leaf, Tensor) and not is_whole(leaf) and -leaf.dim() <= dim < leaf.dim()
    ]
    sizes = [leaf.shape[dim] for leaf in found]
    if len({*sizes}) < 2:
        return arguments
    # An empty tensor is an empty chunk for each slot.
    chunks = [leaf.split(near_equal_sizes(leaf.shape[dim], slots) if leaf.shape[dim] else 0, dim) for leaf in found]
    chunks = [parts if size else parts * slots for parts, size in zip(chunks, sizes, strict=True)]
    replicas = min(map(len, chunks))
    dropped = [leaf for leaf, parts in zip(found, chunks, strict=True) if len(parts) > replicas]
    different = f"batch sizes differ ({', '.join(map(str, dict.fromkeys(sizes)))})"
    advice = "Mark a tensor that every replica needs with dataparallel.whole(tensor)"
    if any(not _is_one_entry_for_each_slot(leaf, dim, slots) for leaf in dropped):
        fall_back(
            "samples are dropped",
            f"{different}, and {replicas} of {slots} replicas run: one of the tensors has no more chunks. {advice}",
        )
    elif len({*sizes} - {slots}) > 1:
        fall_back("each tensor is split by itself", f"{different}. {advice}")
    else:
        counts.note_fallback("each tensor is split by itself")
    kept = next(size for size, parts in zip(sizes, chunks, strict=True) if size and len(parts) == replicas)
    parts = {
        id(leaf): PerReplica(parts[:replicas])
        for leaf, size, parts in zip(found, sizes, chunks, strict=True)
        if size != kept
    }
    return with_leaves(arguments, lambda leaf: parts.get(id(leaf), leaf))


def _is_one_entry_for_each_slot(tensor: Tensor, dim: int, slots: int) -> bool:
    """True if the entries are equal too, so that no value is lost with some of them."""
    return tensor.shape[dim] == slots and bool((tensor == tensor.narrow(dim, 0, 1)).all())
