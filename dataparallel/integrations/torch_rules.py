"""`as_torch_splits` and `fall_back`: torch's rules where the library promises more, and `counts` of calls.

Only ``torch_wrapper`` and ``replacement`` use them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from operator import is_
from typing import Any

from torch import Tensor

from dataparallel.batches.batch_types import PLAIN_LEAVES, PerReplica, container_of, is_registered, is_written_to
from dataparallel.batches.structures import Arguments, ByReference, is_whole, leaves, with_leaves
from dataparallel.comm.checks import near_equal_sizes
from dataparallel.samples import Samples
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


def as_torch_splits(arguments: Any, dim: int, slots: int) -> Any:
    """Returns what `scatter` splits as torch does: by `_by_reference` and `_split_where_sizes_differ`.

    Args:
        arguments: any structure; `Arguments` for those of a call. It is returned as it is if ``slots`` is 0.
    """
    return _split_where_sizes_differ(_by_reference(arguments, ()), dim, slots) if slots else arguments


def _by_reference(obj: Any, above: tuple[int, ...]) -> Any:
    """Marks what torch does not look into: all but tensors, and lists, tuples and dicts that are not empty.

    A program finds there what ``forward`` has written. What belongs to this library is left as it is.
    """
    if type(obj) in PLAIN_LEAVES or isinstance(obj, (Tensor, Samples, PerReplica)) or is_registered(obj):
        return obj
    if is_written_to(obj) or id(obj) in above:  # refused later
        return obj
    container = container_of(obj) if isinstance(obj, (list, tuple, dict)) and obj else None
    if container is None:
        return ByReference(obj)
    old, above = [value for _, value in container.children(obj)], (*above, id(obj))
    is_call = type(obj) is Arguments  # its containers belong to no code of the program
    new = [value if is_call and not value else _by_reference(value, above) for value in old]
    return obj if all(map(is_, new, old)) else container.rebuild(obj, new)


def _split_where_sizes_differ(arguments: Any, dim: int, slots: int) -> Any:
    """Splits each tensor by itself where batch sizes differ, as torch does. All have chunks for the replicas that run.

    torch drops the chunks that are left. A warning says so, unless they are entries of a tensor that has one equal
    entry for each slot: ``Trainer`` of transformers passes a count in that way, and its last batch may be small.
    """
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
