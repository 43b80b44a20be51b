"""`check_shared` looks at arguments that are not split, so that several replicas would get the same object.

It refuses what replicas cannot share, and objects that hold a batch. It warns of lists and arrays that may be one.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from dataparallel.batches.batch_types import PLAIN_LEAVES, PerReplica, batch_of
from dataparallel.batches.structures import Arguments, ByReference, children_of, is_whole
from dataparallel.samples import Samples
from dataparallel.user_warnings import warn_once

MOST_VALUES = 256
"""So many values in an object are looked at, nearest ones first: it may lead to a whole program."""


def check_shared(arguments: Any, found: Sequence[tuple[str, Any]], size: int | None, dim: int, replicas: int) -> None:
    """Checks the arguments of a call with several replicas. ``found`` are their `leaves`, ``size`` is the batch size.

    Without a batch size all replicas would compute the same. So whatever may be a batch is taken for one, unless there
    is a `PerReplica`.

    Raises:
        ValueError: an iterator or a coroutine; an object with a tensor that is a batch.
    """
    others = [(path, leaf) for path, leaf in found if type(leaf) not in PLAIN_LEAVES and not _is_divided(leaf)]
    is_known = size is not None or any(isinstance(leaf, PerReplica) for _, leaf in found)
    for path, leaf in others:
        if isinstance(leaf, (Iterator, AsyncIterator, Coroutine)) and not isinstance(leaf, io.IOBase):
            raise ValueError(
                f"{path} is one {type(leaf).__name__} for {replicas} replicas, and what one of them takes from it the "
                "others do not get: pass a list, dataparallel.samples(list) if it has one entry for each sample, or a "
                "dataparallel.PerReplica with an entry for each replica"
            )
        for name, tensor in _tensors_of(leaf):
            if is_whole(tensor) or isinstance(tensor, nn.Parameter) or not -tensor.dim() <= dim < tensor.dim():
                continue
            if tensor.shape[dim] == size or (not is_known and tensor.shape[dim] > 1):
                raise ValueError(
                    f"{path} is one {type(leaf).__name__} for {replicas} replicas, but its tensor {name!r} of shape "
                    f"{tuple(tensor.shape)} looks like a batch, which would not be split: say how with "
                    "dataparallel.batch_types.register_batch (or register_container), or pass a dict or a dataclass. "
                    "If every replica needs all of the tensor, let the object hold dataparallel.whole(tensor)"
                )
    if (size is not None or not is_known) and any(not isinstance(leaf, Tensor) for _, leaf in found):
        _warn_of_sequences(arguments, size, dim, replicas)


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, Samples, PerReplica, ByReference)) or batch_of(leaf) is not None


def _tensors_of(obj: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yields tensors in the attributes of an object and of objects in them, with their names, except in callables."""
    waiting: list[tuple[Any, Any]] = [("", obj)]
    for name, value in waiting:
        if isinstance(value, Tensor):
            yield name, value
        elif len(waiting) < MOST_VALUES:
            waiting += islice(_parts_of(value), MOST_VALUES)


def _parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if callable(value):  # modules and functions have weights and tables, no batches
        return ()
    slots = [names for cls in type(value).__mro__ if (names := vars(cls).get("__slots__"))]
    in_slots = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    return [
        *getattr(value, "__dict__", {}).items(),
        *((name, getattr(value, name)) for name in in_slots if hasattr(value, name)),
    ]


def _warn_of_sequences(arguments: Any, size: int | None, dim: int, replicas: int) -> None:
    """Warns of the first list or array that may have one entry for each sample."""
    parts = children_of(arguments, "") if type(arguments) is Arguments else [("input", arguments)]
    sequences: list[tuple[str, Any]] = []
    for path, part in parts or ():
        for child_path, child in children_of(part, path) or [(path, part)]:
            _add_sequences(child, child_path, sequences)
    for path, sequence in sequences:
        length = _length(sequence, dim)
        if length == size or (size is None and length > 1 and not _has_numbers(sequence)):
            reason = "nothing in the call is split" if size is None else f"the batch has {size} samples"
            warn_once(
                "sequences",
                f"{path} is a {type(sequence).__name__} of length {length}, and {reason}: all {replicas} replicas get "
                "the whole of it. If it has one entry for each sample, pass dataparallel.samples(list), or "
                "torch.from_numpy(array)",
            )
            return


def _add_sequences(obj: Any, path: str, sequences: list[tuple[str, Any]]) -> bool:
    """Adds arrays, and lists in which nothing is split, without those in others. Returns if something is split."""
    children = children_of(obj, path)
    if children is None:
        if hasattr(type(obj), "__array__") and not isinstance(obj, Tensor) and getattr(obj, "ndim", 0) > 0:
            sequences.append((path, obj))
        return _is_divided(obj)
    inner: list[tuple[str, Any]] = []
    is_split = any([_add_sequences(child, child_path, inner) for child_path, child in children])
    is_sequence = isinstance(obj, list) or (type(obj) is tuple and not _has_numbers(obj))
    sequences += [(path, obj)] if is_sequence and not is_split else inner
    return is_split


def _length(sequence: Any, dim: int) -> int:
    if isinstance(sequence, (list, tuple)):
        return len(sequence)
    shape: Sequence[int] = sequence.shape
    return shape[dim] if -len(shape) <= dim < len(shape) else 1


def _has_numbers(sequence: Any) -> bool:
    """True for what is rather a size: ``(224, 224)``."""
    return isinstance(sequence, (list, tuple)) and len(sequence) > 0 and isinstance(sequence[0], (int, float))
