"""The stages `scatter` and `scatter_kwargs`: they split nested structures. Every error names the place in these.

`Split` says how many samples of a batch each slot gets.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from dataparallel import _torch
from dataparallel.arguments import checked, listed
from dataparallel.autograd.functions import Broadcast, Scatter, own_chunks
from dataparallel.batches.samples import SampleCopies, check_entries, joined_samples
from dataparallel.batches.structures import (
    PLAIN_LEAVES,
    Arguments,
    CopiedContainer,
    PerReplica,
    batch_of,
    children_of,
    container_of,
    is_whole,
    leaves,
    mark_whole,
    number_of_replicas,
    with_leaves,
)
from dataparallel.comm import scatter_coalesced
from dataparallel.comm.buckets import SMALL_BYTES, travels_flat
from dataparallel.comm.checks import check_chunk_sizes, near_equal_sizes, why_no_batch, why_not_movable
from dataparallel.comm.streams.ahead import HostReads, copied_at_once, take_sent_chunks
from dataparallel.comm.streams.held import held_together
from dataparallel.devices import CPU, DeviceLike, resolve_slots
from dataparallel.samples import Samples
from dataparallel.user_warnings import warn_once

ChunkSizes: TypeAlias = "Sequence[float] | None"
"""What users pass: ints are numbers of samples; with a float among them they are shares."""


class Split:
    """Splits every batch alike: by numbers of samples, by shares, or into near-equal chunks for ``None``.

    ``given``: the user's ``chunk_sizes``; a sequence is kept as a tuple, so that users assign it and cannot change it
    in place. ``slots``: how many; ``None`` if it is not known yet.
    """

    def __init__(self, given: ChunkSizes, slots: int | None = None) -> None:
        self.given = None if given is None else _checked(given, slots)

    def sizes(self, total: int, slots: int) -> list[int]:
        """Returns the sizes of the chunks of ``total`` samples, at least 1 each. There may be fewer than slots."""
        if self.given is None:
            return near_equal_sizes(total, slots)
        samples = [number for number in self.given if isinstance(number, int)]
        if len(samples) == len(self.given):
            return check_chunk_sizes(samples, slots, total)
        _check_length(self.given, slots)
        return split_by_shares(total, self.given)


def _checked(given: Any, slots: int | None) -> tuple[float, ...]:
    what = (
        "; pass a number of samples for each slot (ints), a share for each slot (floats), or None for near-equal "
        "chunks, and leave slots without samples out of device_ids"
    )
    numbers = listed("chunk_sizes", given, float, what, above=0)
    if slots is not None:
        _check_length(numbers, slots)
    if not numbers:
        raise ValueError(f"chunk_sizes={given!r} has no entry{what}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"chunk_sizes={numbers}: a share is a finite number")
    return tuple(numbers)


def split_by_shares(total: int, shares: Sequence[float]) -> list[int]:
    """Splits ``total`` samples in the ratio of ``shares``, by largest remainders.

    Each slot gets its quota rounded down. The samples that are left go to the slots whose quotas have lost most, lower
    slots first. A slot gets at least one sample, and of two slots the one with the larger share gets no fewer samples.
    With fewer samples than slots, the first slots get one each. The arithmetic is exact, so all machines agree.

    Source: the method of Hamilton, M. Balinski and H. P. Young, Fair Representation, 1982.
    """
    if total < len(shares):
        return near_equal_sizes(total, len(shares))
    exact = [Fraction(share) for share in shares]
    whole = sum(exact)
    quotas = [total * share / whole for share in exact]
    sizes = [max(1, math.floor(quota)) for quota in quotas]
    slots = range(len(shares))
    while (left := total - sum(sizes)) > 0:
        # Fewer than there are slots: each slot gets one of them at most.
        for slot in sorted(slots, key=lambda i: (sizes[i] - quotas[i], i))[:left]:
            sizes[slot] += 1
    while sum(sizes) > total:  # small shares were rounded up to one sample, and others make room for them
        slot = max((i for i in slots if sizes[i] > 1), key=lambda i: (sizes[i] - quotas[i], i))
        sizes[slot] -= 1
    return sizes


def _check_length(given: Sequence[float], slots: int) -> None:
    if len(given) != slots:
        raise ValueError(f"chunk_sizes={list(given)} has {len(given)} entries for {slots} slots; pass one for each")


@_torch.not_traced
def scatter(
    inputs: Any,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[float] | None = None,
) -> list[Any]:
    """Splits every tensor of a nested structure along ``dim``, and returns one structure for each slot.

    Chunks are near-equal, as ``torch.chunk`` makes them, or have ``chunk_sizes``. A batch with fewer samples than slots
    gives fewer structures. Tensors of 0 dimensions and tensors marked `whole` go to every slot. A list marked with
    `dataparallel.samples` is split itself, and the tensors in it are moved whole. Each slot gets its own entry of a
    `PerReplica`. Other objects are handed to all slots by reference; each slot has its own containers. If no tensor is
    to be split, the structure is repeated for each slot, or for each entry of a `PerReplica` in it. All tensors arrive
    on their slot's device. Host memory is the caller's again when this returns, also if it is pinned.

    Args:
        inputs: tensors, containers and batches (see ``dataparallel.batch_types``), nested to any depth.
        target_gpus: the slots, of any device type.
        dim: the batch dimension of the tensors; batch types have their own.
        chunk_sizes: the number of samples for each slot, at least 1 each, which have to be all of the batch. With a
            float among them they are shares of a batch of any size: ``[0.5, 1, 1]``. See `split_by_shares`.

    Returns:
        A list with one structure for each slot that has samples.

    Raises:
        ValueError: batch sizes disagree (the message has both, with their paths); ``chunk_sizes`` do not fit; a tensor
            has no dimension ``dim``, or a layout that cannot be split; a container contains itself; a `PerReplica` has
            another number of entries than there are replicas; several replicas would share a cache of ``transformers``,
            an iterator, or an object with a tensor that is a batch.
    """
    with HostReads() as reads:
        return _scatter(inputs, target_gpus, checked("dim", dim, int), Split(chunk_sizes), "input", reads)


@_torch.not_traced
def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[float] | None = None,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """`scatter` for the arguments of a call. Batch sizes of positional and keyword arguments must agree.

    Returns:
        A tuple with the positional arguments for each slot, and one with the keyword arguments for each slot. Both are
        empty if there is no argument.
    """
    with HostReads() as reads:
        return scatter_arguments(inputs, kwargs, target_gpus, checked("dim", dim, int), Split(chunk_sizes), reads)


def scatter_arguments(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int,
    split: Split,
    reads: HostReads,
    copied: list[CopiedContainer] | None = None,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """`scatter_kwargs` for the forms. When it returns, the copies in ``reads`` may still read pinned memory.

    Containers among the arguments that replicas may write to are appended to ``copied``.
    """
    if not inputs and not kwargs:
        resolve_slots(target_gpus)
        return (), ()
    chunks = _scatter(Arguments((tuple(inputs), kwargs or {})), target_gpus, dim, split, "", reads, copied)
    return tuple(args for args, _ in chunks), tuple(keywords for _, keywords in chunks)


def _scatter(
    inputs: Any,
    devices: Sequence[DeviceLike],
    dim: int,
    split: Split,
    name: str,
    reads: HostReads,
    copied: list[CopiedContainer] | None = None,
) -> list[Any]:
    slots = resolve_slots(devices)
    found = list(leaves(inputs, name))
    size = _batch_size(found, dim)
    sizes = None if size is None else split.sizes(size, len(slots))
    replicas = number_of_replicas(found, size, sizes, len(slots))
    if replicas > 1:
        check_shared(inputs, found, size, dim, replicas)
    splitter = _Splitter(slots[:replicas], sizes, dim, [leaf for _, leaf in found], copied)
    parts = ((tensor, splitter.sizes_of(tensor)) for tensor in splitter.tensors)
    # Memory is held for peers once, not for each tensor.
    with held_together(), copied_at_once(parts, splitter.slots, dim, reads):
        splitter.send_small()
        return splitter.split(inputs)


def _batch_size(found: Sequence[tuple[str, Any]], dim: int) -> int | None:
    first: tuple[str, int, Any] | None = None
    for path, leaf in found:
        if isinstance(leaf, Tensor):
            problem = why_not_movable(leaf)
            if problem:
                raise ValueError(f"{path} {problem}")
            if is_whole(leaf):
                continue
            problem = why_no_batch(leaf)
            if problem:
                raise ValueError(
                    f"{path} cannot be split: {problem}; pass a strided or a sparse COO tensor, mark it "
                    "dataparallel.whole(...), or wrap it in a class of your own and say how it is split, "
                    "dataparallel.batch_types.register_batch"
                )
            if not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(
                    f"{path} of shape {tuple(leaf.shape)} has no dimension {dim} to split; "
                    "mark it dataparallel.whole(...) if every replica needs all of it, and a list that has one entry "
                    "for each sample dataparallel.samples(...)"
                )
            size = leaf.shape[dim]
        else:
            batch = batch_of(leaf)
            if isinstance(leaf, Samples):
                check_entries(leaf, path)
                size = len(leaf)
            elif batch is not None:
                size = batch.size(leaf)
            else:
                continue
        if first is None:
            first = (path, size, leaf)
        elif size != first[1]:
            raise ValueError(
                f"batch sizes disagree along dimension {dim}: {first[0]} has {first[1]}, {path} has {size}; mark a "
                "tensor that is no batch (a mask, a table) as dataparallel.whole(tensor), and a list that has one "
                "entry for each sample as dataparallel.samples(list)"
                f"{_turned(first, (path, size, leaf), dim) or _filled((first[0], path))}"
            )
    return None if first is None else first[1]


def _filled(paths: Sequence[str]) -> str:
    """Returns what to do if a path is that of an entry of an argument, which an earlier call may have written."""
    is_entry = any(path.startswith(("args", "kwargs")) and path.count("[") + path.count(".") > 1 for path in paths)
    return ". A list or dict that forward fills has to be a new one for each call" if is_entry else ""


def _turned(first: tuple[str, int, Any], second: tuple[str, int, Any], dim: int) -> str:
    """Returns what to do if one of two leaves has its samples along another dimension, as the state of an LSTM has."""
    for (path, _, leaf), (_, size, _) in ((second, first), (first, second)):
        if isinstance(leaf, Tensor) and size in leaf.shape:
            return (
                f". If {path} has its samples along dimension {[*leaf.shape].index(size)}, pass it transposed, so that "
                f"they are along dimension {dim}, and transpose it back in forward"
            )
    return ""


class _Splitter:
    """One scatter: the slots in use and their chunk sizes (``None``: nothing is to be split)."""

    def __init__(
        self,
        slots: list[torch.device],
        sizes: list[int] | None,
        dim: int,
        found: Sequence[Any],
        copied: list[CopiedContainer] | None,
    ) -> None:
        self.slots, self.sizes, self.dim, self.copied = slots, sizes, dim, copied
        self.tensors = {id(leaf): leaf for leaf in found if isinstance(leaf, Tensor)}.values()
        self.marked = [leaf for leaf in found if isinstance(leaf, Samples)]
        self.samples: SampleCopies | None = None
        self.keywords: Any = None  # no code outside of a replica's call has the dict of its keyword arguments
        # What is in two places becomes one chunk in two places: attention tests whether query is key, and forward
        # finds in one dict what it has written into the other one.
        # The key is the id of an object. The entry holds this object, so that no other object gets the id.
        self.chunks: dict[int, tuple[Any, Sequence[Any]]] = {}

    def split(self, obj: Any) -> list[Any]:
        if id(obj) not in self.chunks:
            self.chunks[id(obj)] = obj, self.split_once(obj)
        return list(self.chunks[id(obj)][1])

    def split_once(self, obj: Any) -> Sequence[Any]:
        if isinstance(obj, Tensor):
            return self.split_tensor(obj)
        if type(obj) is Arguments:
            self.keywords = obj[1]
            return list(zip(*map(self.split, obj), strict=True))
        if isinstance(obj, PerReplica):
            return [moved(entry, slot) for entry, slot in zip(obj, self.slots, strict=True)]
        if isinstance(obj, Samples):
            assert self.sizes is not None
            self.samples = self.samples or SampleCopies(self.marked, self.slots, self.sizes)
            return self.samples.of(obj)
        batch = batch_of(obj)
        if batch is not None:
            assert self.sizes is not None
            if len(self.slots) == 1:
                return [batch.to(obj, self.slots[0])]
            parts = batch.split(obj, self.sizes)
            return [batch.to(part, slot) for part, slot in zip(parts, self.slots, strict=True)]
        container = container_of(obj)
        if container is None:
            return [obj] * len(self.slots)
        columns = [self.split(value) for _, value in container.children(obj)]
        copies = [container.rebuild(obj, [column[slot] for column in columns]) for slot in range(len(self.slots))]
        if self.copied is not None and obj is not self.keywords:
            self.copied += CopiedContainer.noted(obj, copies)
        return copies

    def sizes_of(self, tensor: Tensor) -> list[int] | None:
        return None if is_whole(tensor) else self.sizes

    def send_small(self) -> None:
        """Splits small tensors on accelerators together, those of each device, if no graph needs them."""
        by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        for tensor in () if len(self.slots) == 1 or _torch.is_inside_functorch_transform() else self.tensors:
            can_be_packed = tensor.device != CPU and travels_flat(tensor) and not is_whole(tensor)
            if can_be_packed and tensor.nbytes <= SMALL_BYTES and not _has_graph(tensor):
                by_device[tensor.device].append(tensor)
        for together in by_device.values():
            if len(together) > 1:
                assert self.sizes is not None
                chunks = scatter_coalesced(together, self.slots, self.sizes, self.dim)
                for tensor, of_tensor in zip(together, chunks, strict=True):
                    self.chunks[id(tensor)] = tensor, own_chunks(of_tensor, self.slots, tensor)

    def split_tensor(self, tensor: Tensor) -> Sequence[Tensor]:
        if len(self.slots) == 1 and tensor.device == self.slots[0]:
            return [tensor]
        if not (tensor.requires_grad and torch.is_grad_enabled()):  # chunks that were sent ahead are in no graph
            copied = take_sent_chunks(tensor, self.slots, self.sizes_of(tensor), self.dim)
            if copied is not None:
                return copied
        if not is_whole(tensor):
            assert self.sizes is not None
            split = Scatter.apply if _has_graph(tensor) else Scatter.unrecorded
            return split(self.slots, self.sizes, self.dim, tensor)
        copies = Broadcast.apply(self.slots, tensor)
        for copy in copies:
            if tensor.dim() > 0:
                mark_whole(copy)
        return copies


def _has_graph(tensor: Tensor) -> bool:
    """True if a node carries what belongs to the tensor. It has no forward-mode derivative, and refuses a tangent."""
    return (torch.is_grad_enabled() and tensor.requires_grad) or unpack_dual(tensor).tangent is not None


def moved(obj: Any, device: torch.device) -> Any:
    """Returns a copy of the structure with all tensors and batches on ``device``, or ``obj`` if all are there."""
    return with_leaves(obj, partial(_moved_leaf, device=device))


def _moved_leaf(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf if leaf.device == device else Broadcast.apply([device], leaf)[0]
    if isinstance(leaf, Samples):
        return joined_samples([leaf], device)
    batch = batch_of(leaf)
    return leaf if batch is None else batch.to(leaf, device)


MOST_VALUES = 256
"""So many values in an object are looked at, nearest ones first: it may lead to a whole program."""


def check_shared(arguments: Any, found: Sequence[tuple[str, Any]], size: int | None, dim: int, replicas: int) -> None:
    """Checks the arguments of a call with several replicas. ``found`` are their `leaves`, ``size`` is the batch size.

    Without a batch size all replicas would compute the same. So whatever may be a batch is taken for one, unless there
    is a `PerReplica`.
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
    return isinstance(leaf, (Tensor, Samples, PerReplica)) or batch_of(leaf) is not None


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
    parts = children_of(arguments, "") if type(arguments) is Arguments else [("input", arguments)]
    sequences: list[tuple[str, Any]] = []
    for path, part in parts or ():
        for child_path, child in children_of(part, path) or [(path, part)]:
            _add_sequences(child, child_path, sequences)
    for path, sequence in sequences:
        shape = [len(sequence)] if isinstance(sequence, (list, tuple)) else sequence.shape
        at = 0 if isinstance(sequence, (list, tuple)) else dim
        length = shape[at] if -len(shape) <= at < len(shape) else 1
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


def _has_numbers(sequence: Any) -> bool:
    """True for what is rather a size: ``(224, 224)``."""
    return isinstance(sequence, (list, tuple)) and len(sequence) > 0 and isinstance(sequence[0], (int, float))
