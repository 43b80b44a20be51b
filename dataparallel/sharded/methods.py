"""Methods of `ShardedTensor`: Python's operators, methods on memory, which raise, and methods for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.shards import local_shard_shapes, starts_of_shards
from dataparallel.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# ---- Python's operators ----------------------------------------------------------------------------------------------

# torch's methods for ``+``, ``@``, ``==`` and ``*=`` turn a ``TypeError`` into ``NotImplemented``. So Python says that
# the operands are unsupported, and ``==`` compares identities. These methods call torch's functions instead.

Method = Callable[[Any, Any], Any]

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
"""torch's function for each of Python's operators."""

_EITHER_WAY = ("add", "mul", "and", "or", "xor")  # with the tensor first: torch takes no number there


def _divided_by(right: Tensor, left: Any) -> Tensor:
    """``left / right``, with the same bits as torch, which multiplies a number by the reciprocal."""
    return torch.true_divide(left, right) if isinstance(left, Tensor) else torch.mul(torch.reciprocal(right), left)


def _swapped(function: Method) -> Method:
    return lambda right, left: function(left, right)


def _methods() -> dict[str, Method]:
    """The methods by name. Reflected ones get the right operand, whose method it is, and the left one."""
    made: dict[str, Method] = {name: getattr(torch, name) for name in COMPARISONS}
    for name, function in OPERATORS.items():
        made[name] = run = getattr(torch, function)
        made[f"r{name}"] = run if name in _EITHER_WAY else _swapped(run)
        if name != "matmul":
            made[f"i{name}"] = getattr(Tensor, f"{function}_")
    return made | {"rsub": torch.rsub, "rtruediv": _divided_by, "itruediv": Tensor.div_}


def _method(name: str, function: Method) -> Method:
    def method(self: Tensor, other: Any) -> Any:
        if isinstance(other, (Tensor, Number)):
            return function(self, other)
        return NotImplemented

    method.__name__ = method.__qualname__ = name
    return method


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
    shapes = local_shard_shapes(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
    starts = starts_of_shards(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
    for shard, start, shape in zip(tensor._shards, starts, shapes, strict=True):
        if len(shape) == tensor.dim() and shape.numel() and shard.dim() == len(shape):
            yield shard, torch.Size(start), shape


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
    **{f"__{name}__": _method(f"__{name}__", function) for name, function in _methods().items()},
    **{name: _refusing(name) for name in REFUSED},
    "data_ptr": data_ptr,
    "__hash__": Tensor.__hash__,  # a class that has __eq__ has no hash otherwise
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunks,
    "__get_tensor_shard__": _shard_at,
}
for _name, _own in _BY_NAME.items():
    setattr(ShardedTensor, _name, _own)
