"""Checks of the arguments of ``comm``'s functions, before a tensor moves. ``batches`` calls them too."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dataparallel.comm.buckets import PLAIN_TYPES


def near_equal_sizes(total: int, slots: int) -> list[int]:
    """Chunk sizes as ``torch.chunk`` makes them: all but the last are equal, and there may be fewer than ``slots``.

    An empty batch is one empty chunk.
    """
    if total == 0:
        return [0]
    size = -(-total // slots)
    return [min(size, total - start) for start in range(0, total, size)]


def tensor_split_sizes(total: int, count: int) -> list[int]:
    """``count`` sizes that add up to ``total``, as ``torch.tensor_split`` makes them. They differ by one at most."""
    return [total // count + (i < total % count) for i in range(count)]


def check_chunk_sizes(chunk_sizes: Sequence[int], slots: int, total: int) -> list[int]:
    """``chunk_sizes`` as a list.

    Raises:
        ValueError: not one size for each slot, a negative size, or a sum other than ``total``.
    """
    sizes = [operator.index(size) for size in chunk_sizes]
    if len(sizes) != slots:
        raise ValueError(f"chunk_sizes={sizes} has {len(sizes)} entries for {slots} slots; pass one for each")
    if any(size < 0 for size in sizes):
        raise ValueError(f"chunk_sizes={sizes}: sizes cannot be negative")
    if sum(sizes) != total:
        raise ValueError(
            f"chunk_sizes={sizes} add up to {sum(sizes)}, but the batch has {total} samples; pass sizes that "
            "fit this batch (a smaller last batch needs its own), or None for near-equal chunks"
        )
    return sizes


def why_not_movable(tensor: Tensor) -> str | None:
    """Why the tensor cannot be moved, as the rest of a sentence; ``None`` if it can."""
    if is_lazy(tensor):
        return "is an uninitialised lazy parameter; run the module once on a sample batch first"
    if tensor.is_meta:
        return f"of shape {tuple(tensor.shape)} is on the meta device and has no data to move"
    return None


def why_no_batch(tensor: Tensor) -> str | None:
    """Why the tensor can be neither split nor joined along a dimension, in words; ``None`` if it can."""
    if tensor.is_nested:
        return f"it is a nested tensor of layout {tensor.layout}"
    return None if tensor.layout in (torch.strided, torch.sparse_coo) else f"its layout is {tensor.layout}"


def why_not_gatherable(tensors: Sequence[Tensor], dim: int) -> str | None:
    """Why the tensors cannot be joined along ``dim``, in words; ``None`` if they can."""
    first = tensors[0]
    for slot, tensor in enumerate(tensors[1:], start=1):
        if tensor.dtype != first.dtype:
            return f"tensor 0 has dtype {first.dtype}, tensor {slot} has {tensor.dtype}"
        ours, theirs = list(first.shape), list(tensor.shape)
        if len(ours) == len(theirs) and -len(ours) <= dim < len(ours):
            ours[dim] = theirs[dim] = 0
        if ours != theirs:
            return (
                f"tensor 0 has shape {tuple(first.shape)}, tensor {slot} has {tuple(tensor.shape)}; "
                f"shapes may differ only along dimension {dim}"
            )
    return None


def check_exactly_one(devices: object, out: object) -> None:
    if (devices is None) == (out is None):
        raise ValueError(f"pass exactly one of devices and out; got devices={devices!r} and out={out!r}")


def check_movable(tensors: Sequence[Tensor]) -> None:
    """Raises ``ValueError`` for the first tensor that cannot be moved; the message says why."""
    for index, tensor in enumerate(tensors):
        if tensor.is_meta or type(tensor) not in PLAIN_TYPES:
            problem = why_not_movable(tensor)
            if problem:
                raise ValueError(f"tensor {index} {problem}")


def check_out(out: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> None:
    """Raises ``ValueError`` for the first of ``out`` that cannot be written, or has another shape."""
    check_movable(out)
    for index, (target, shape) in enumerate(zip(out, shapes, strict=True)):
        if list(target.shape) != list(shape):
            raise ValueError(f"out[{index}] has shape {tuple(target.shape)}, expected {tuple(shape)}")


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """The shape with another size in one dimension."""
    new = [*shape]
    new[dim] = size
    return new


def check_summable(tensors: Sequence[Tensor], where: str = "") -> None:
    """Raises ``ValueError`` for no tensors, and for shapes or dtypes that differ. ``where`` is put into the message."""
    if not tensors:
        raise ValueError("cannot add no tensors; pass at least one")
    check_movable(tensors)
    for kind, of_terms in (("shapes", [tuple(t.shape) for t in tensors]), ("dtypes", [t.dtype for t in tensors])):
        for slot, found in enumerate(of_terms):
            if found != of_terms[0]:
                raise ValueError(
                    f"cannot add tensors of different {kind}{where}: tensor 0 has {of_terms[0]}, "
                    f"tensor {slot} has {found}"
                )
