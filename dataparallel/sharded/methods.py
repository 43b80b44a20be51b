"""Methods of sharded tensors: Python's operators, those for the memory of a tensor, and those that checkpoints call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.shards import local_shard_shapes, starts_of_shards

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from dataparallel.sharded.tensor import ShardedTensor

# ---- Python's operators ----------------------------------------------------------------------------------------------

# Of ``+``, ``@``, ``==`` and ``*=`` torch's methods turn a ``TypeError`` into ``NotImplemented``. Then Python says only
# that the operands are unsupported, and ``==`` compares the two objects and gives False. These call torch's functions.

Method = Callable[[Any, Any], Any]

FORWARD: dict[str, Method] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "matmul": torch.matmul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _divided_by(right: Tensor, left: Any) -> Tensor:
    """``left / right`` to the bit of torch's own: for numbers that is by way of the reciprocal."""
    return torch.true_divide(left, right) if isinstance(left, Tensor) else torch.mul(torch.reciprocal(right), left)


# Called with the right operand, whose method it is, and the left one.
REFLECTED: dict[str, Method] = {
    "radd": torch.add,
    "rsub": torch.rsub,
    "rmul": torch.mul,
    "rtruediv": _divided_by,
    "rfloordiv": lambda right, left: torch.floor_divide(left, right),
    "rmod": lambda right, left: torch.remainder(left, right),
    "rpow": lambda right, left: torch.pow(left, right),
    "rmatmul": lambda right, left: torch.matmul(left, right),
    "rand": torch.bitwise_and,
    "ror": torch.bitwise_or,
    "rxor": torch.bitwise_xor,
    "rlshift": lambda right, left: torch.bitwise_left_shift(left, right),
    "rrshift": lambda right, left: torch.bitwise_right_shift(left, right),
}

IN_PLACE: dict[str, Method] = {
    "iadd": Tensor.add_,
    "isub": Tensor.sub_,
    "imul": Tensor.mul_,
    "itruediv": Tensor.div_,
    "ifloordiv": Tensor.floor_divide_,
    "imod": Tensor.remainder_,
    "ipow": Tensor.pow_,
    "iand": Tensor.bitwise_and_,
    "ior": Tensor.bitwise_or_,
    "ixor": Tensor.bitwise_xor_,
    "ilshift": Tensor.bitwise_left_shift_,
    "irshift": Tensor.bitwise_right_shift_,
}


def _method(name: str, function: Method) -> Method:
    def method(self: Tensor, other: Any) -> Any:
        if isinstance(other, (Tensor, Number)):
            return function(self, other)
        return NotImplemented

    method.__name__ = method.__qualname__ = name
    return method


# ---- memory, which a sharded tensor has not --------------------------------------------------------------------------

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


class _NoMemory(TypeError, _torch.UnsupportedFakeTensor):
    """``torch.compile`` takes it for a tensor that cannot be in a graph: it ends the graph, and goes on after it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = sentence  # torch reads it

    __repr__ = TypeError.__repr__


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _NoMemory(
            f"{name} does not work on sharded tensors, whose memory is that of their shards; "
            "use full_tensor() to get the whole tensor first"
        )

    method.__name__ = method.__qualname__ = name
    return method


_refuse_data_ptr = _refusing("data_ptr")


def data_ptr(self: Tensor) -> int:
    """Raises, except where torch takes 0 for a tensor whose storage it cannot use.

    Others would take all sharded tensors for one, if all had the address 0.
    """
    return 0 if _torch.takes_address_0() else _refuse_data_ptr(self)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

# ``torch.distributed.checkpoint`` has a chunk for each part, with its place in the whole, and computes from these what
# to read. So a checkpoint is loaded with any number of devices and machines, into plain tensors and into a ``DTensor``.


def _places(tensor: ShardedTensor) -> Iterator[tuple[Tensor, torch.Size, torch.Size]]:
    """Each part here that has elements: the part, where in the whole it begins, and its shape."""
    shapes = local_shard_shapes(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
    starts = starts_of_shards(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
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
    """The part that is written or read. Parts of a replicated tensor begin at one place, and the index tells them."""
    if not tensor.numel():
        return tensor._shards[0].new_empty(tensor.shape)
    found = [part for part, start, _ in _places(tensor) if start == index.offset]
    if not found:
        raise ValueError(f"no part of {index.fqn!r}, {tensor!r}, begins at {index.offset}")
    return found[min(index.index or 0, len(found) - 1)] if len(found) > 1 else found[0]


METHODS: dict[str, Any] = {
    f"__{name}__": _method(f"__{name}__", function) for name, function in (FORWARD | REFLECTED | IN_PLACE).items()
}
"""The methods by name."""
METHODS |= {
    **{name: _refusing(name) for name in REFUSED},
    "data_ptr": data_ptr,
    "__hash__": Tensor.__hash__,  # a class that has __eq__ has no hash otherwise
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunks,
    "__get_tensor_shard__": _shard_at,
}
