"""Sharded tensors in ``torch.distributed.checkpoint``: what is written and read of them, and full states.

A checkpoint has a chunk for each part, with its place in the whole. torch computes from these what to read, so a
checkpoint is loaded with any number of devices and machines, into plain tensors and into a ``DTensor``, and back. The
methods with two underscores are torch's protocol for classes of tensors. `ShardedTensor` has them from here; torch
calls them.

For full states torch knows no protocol: ``get_model_state_dict`` and its relatives would take a sharded tensor for a
plain one. So two of their functions are wrapped when the first tensor is divided (`prepare`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.sharded.parts import local_shapes, starts_of_parts
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.tensor import ShardedTensor, distributed_as

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def _places(tensor: ShardedTensor) -> Iterator[tuple[Tensor, torch.Size, torch.Size]]:
    """Each part here that has elements: the part, where in the whole it begins, and its shape."""
    shapes = local_shapes(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
    starts = starts_of_parts(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
    for part, start, shape in zip(tensor._shards, starts, shapes, strict=True):
        if len(shape) == tensor.dim() and shape.numel() and part.dim() == len(shape):
            yield part, torch.Size(start), shape


def _chunks(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """What is read: every part, also of replicated tensors."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=start, sizes=shape) for _, start, shape in _places(tensor)]


def _write_items(tensor: ShardedTensor, fqn: str, given: ShardedTensor) -> list[WriteItem]:
    """What is written: every part, of a replicated tensor one, of an empty one nothing but its shape."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunks = _chunks(tensor)
    if isinstance(tensor._placement, Replicate):
        chunks = chunks[:1]
    if not tensor.numel():
        chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.shape)]
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks
    ]


def _shard_at(tensor: ShardedTensor, index: MetadataIndex) -> Tensor:
    """The part that is written or read. Parts of a replicated tensor begin at one place, and the index tells them.

    Raises:
        ValueError: no part here begins there.
    """
    if not tensor.numel():
        return tensor._shards[0].new_empty(tensor.shape)
    found = [part for part, start, _ in _places(tensor) if start == index.offset]
    if not found:
        raise ValueError(f"no part of {index.fqn!r}, {tensor!r}, begins at {index.offset}")
    return found[min(index.index or 0, len(found) - 1)] if len(found) > 1 else found[0]


_methods: dict[str, Callable[..., Any]] = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunks,
    "__get_tensor_shard__": _shard_at,
}
for _name, _method in _methods.items():
    setattr(ShardedTensor, _name, _method)


# ---- full states -----------------------------------------------------------------------------------------------------


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that makes a full state from a sharded one, for ours too. Over machines it is collective."""

    def gather_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        device = CPU if kwargs.get("cpu_offload") else None

        def full(leaf: Any) -> Any:
            return leaf.full_tensor(device) if isinstance(leaf, ShardedTensor) else leaf

        return gather(_torch.pytree.tree_map(full, state_dict), *args, **kwargs)

    return gather_state_dict


def _distributing(distribute: Callable[..., None]) -> Callable[..., None]:
    """torch's function that divides a full state as the local one is, for ours too. No device has a whole tensor."""

    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        ours = {
            key: value
            for key, value in local.items()
            if isinstance(value, ShardedTensor) and isinstance(full.get(key), Tensor) and full[key].shape == value.shape
        }
        distribute({key: value for key, value in full.items() if key not in ours}, local, *args, **kwargs)
        for key, like in ours.items():
            local[key] = distributed_as(full[key], like)

    return distribute_state_dict


def prepare() -> None:
    """Has torch's functions for full states know sharded tensors. It imports ``torch.distributed``, the first time."""
    _torch.wrap_full_states(_gathering, _distributing)
