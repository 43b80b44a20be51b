"""One node of autograd's graph for all outputs of a unit's call: its backward begins when all that it gets is there.

The gradient of an auxiliary loss comes long before that of the block's main output. Without the node it would have the
block gathered at once, and the block would stay full until the other gradient comes; with a loss for each block all of
them would be full. And which gradient comes first depends on timing, but over machines all have to gather in one order.

The node hands gradients on as they are, so they can be differentiated again, and it keeps no tensor. A backward that
reaches one of its outputs reaches all of them, as it does with a compiled function: what made an output without a
gradient gets ``None``, and frees what it has saved. Losses of the outermost module's outputs may have separate
backwards, so these get such a node only where units are sharded over machines; elsewhere ``joined`` makes one of those
that share a graph. Only ``units.calls`` uses this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.one_node import OneNode
from dataparallel.batch_types import container_of
from dataparallel.structures import children_of

__all__ = ["with_one_node"]


def with_one_node(output: Any, given: Any) -> Any:
    """The nested structure with outputs of one node in place of its tensors, on the same memory.

    A tensor is left alone if it has no graph, is sparse, nested or of another class than ``Tensor``, or shares memory
    with another output or with what is ``given``: a change in place would be lost to the other's graph. So are batches
    and given containers. The same object is returned if there are not two tensors that different nodes have made.

    Args:
        output: of the call.
        given: the arguments of the call.
    """
    kept = {id(part): part for part in _parts(given)}
    found = {id(part): part for part in _parts(output, kept) if isinstance(part, Tensor)}
    if len(_makers(found)) < 2:
        return output
    uses = Counter(_memory_of(part) for part in (kept | found).values() if isinstance(part, Tensor))
    joined = {key: tensor for key, tensor in found.items() if _has_own_memory(tensor, uses)}
    if len(_makers(joined)) < 2:
        return output
    joined = {key: tensor for key, tensor in joined.items() if tensor.grad_fn is not None}
    return _replaced(output, dict(zip(joined, OneNode.apply(*joined.values()), strict=True)), kept)


def _makers(tensors: Mapping[int, Tensor]) -> set[Any]:
    """The nodes that have made them."""
    return {tensor.grad_fn for tensor in tensors.values()} - {None}


def _has_own_memory(tensor: Tensor, uses: Mapping[int | None, int]) -> bool:
    memory = _memory_of(tensor)
    return memory is not None and uses[memory] == 1


def _memory_of(tensor: Tensor) -> int | None:
    """A number for its memory; ``None`` if that is unknown."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or id(tensor)  # those without elements share nothing


def _parts(obj: Any, without: Mapping[int, Any] | None = None) -> Iterator[Any]:
    """Containers and leaves of a nested structure, except those in ``without`` and what is below them."""
    if without is not None and id(obj) in without:
        return
    yield obj
    for _, child in children_of(obj, "") or ():
        yield from _parts(child, without)


def _replaced(obj: Any, new: Mapping[int, Tensor], kept: Mapping[int, Any]) -> Any:
    if id(obj) in new:
        return new[id(obj)]
    children = None if id(obj) in kept else children_of(obj, "")
    if children is None:
        return obj
    values = [_replaced(child, new, kept) for _, child in children]
    if all(value is child for value, (_, child) in zip(values, children, strict=True)):
        return obj
    container = container_of(obj)
    assert container is not None  # it has children
    return container.rebuild(obj, values)
