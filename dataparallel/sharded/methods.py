"""Methods of `ShardedTensor`: methods on memory, which raise, and methods for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.sharded.placements import Replicate, on_this_machine, shard_shapes, shards_on_all_machines
from dataparallel.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# ---- methods on memory, which a sharded tensor does not have ---------------------------------------------------------

REFUSED = (
    "numpy",
    "tolist",
    "storage",
    "untyped_storage",
    "_typed_storage",
    "share_memory_",
    "apply_",
    "map_",
    "map2_",
    "__array__",
    "__dlpack__",
)


class NoStorage(TypeError, _torch.UnsupportedFakeTensor):
    """``torch.compile`` takes this error as a graph break: it ends the graph, and goes on after the call."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = sentence  # torch reads it

    __repr__ = TypeError.__repr__


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoStorage(
            f"{name} does not work on sharded tensors, whose memory is that of their shards; "
            "use full_tensor() to get the whole tensor first. To save a model, save "
            "fully_shard.full_state_dict(model), model.save_pretrained(folder, state_dict=...) for example, or use the "
            "trainer's save_model"
        )

    method.__name__ = method.__qualname__ = name
    return method


_refuse_data_ptr = _refusing("data_ptr")


def data_ptr(self: Tensor) -> int:
    """Raises, except for callers in torch that take the address 0 as a tensor without usable storage.

    Other callers would take all sharded tensors for the same tensor if all had the address 0.
    """
    return 0 if _torch.takes_address_0() else _refuse_data_ptr(self)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

# ``torch.distributed.checkpoint`` has a chunk for each shard, with its position in the full tensor, and finds from that
# what to read. So any number of devices and machines can load a checkpoint, into plain tensors and a ``DTensor`` too.


def _positioned_shards(tensor: ShardedTensor) -> Iterator[tuple[Tensor, torch.Size, torch.Size]]:
    """The non-empty shards of this machine: each with its position in the full tensor and its shape."""
    placement, begin, starts = tensor._placement, 0, []
    for shape in shard_shapes(tensor.shape, placement, shards_on_all_machines(len(tensor._shards), tensor.over)):
        starts.append([0] * tensor.dim())
        if tensor.dim() and not isinstance(placement, Replicate):
            starts[-1][placement.dim] = begin
            begin += shape[placement.dim]
    for shard, start in zip(tensor._shards, on_this_machine(starts, tensor.over), strict=True):
        if shard.dim() == tensor.dim() and shard.numel():
            yield shard, torch.Size(start), shard.shape


def _chunks(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The chunks to read: one for every shard, also of replicated tensors."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=start, sizes=shape) for _, start, shape in _positioned_shards(tensor)]


def _write_items(tensor: ShardedTensor, fqn: str, given: ShardedTensor) -> list[WriteItem]:
    """The chunks to write: one for every shard, one for a replicated tensor, and for an empty tensor only its shape."""
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
    """The shard to write or read. All copies of a replicated tensor have the same offset; the index says which one."""
    if not tensor.numel():
        return tensor._shards[0].new_empty(tensor.shape)
    shards = [shard for shard, start, _ in _positioned_shards(tensor) if start == index.offset]
    if not shards:
        raise ValueError(f"no part of {index.fqn!r}, {tensor!r}, begins at {index.offset}")
    return shards[min(index.index or 0, len(shards) - 1)] if len(shards) > 1 else shards[0]


_BY_NAME: dict[str, Any] = {
    **{name: _refusing(name) for name in REFUSED},
    "data_ptr": data_ptr,
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunks,
    "__get_tensor_shard__": _shard_at,
}
for _name, _own in _BY_NAME.items():
    setattr(ShardedTensor, _name, _own)
