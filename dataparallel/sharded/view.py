"""`ShardedView`: what a view of a sharded tensor is, except for second objects on the same shards.

Nearly every view needs elements of several owners, and some do if the tensor is divided in another way. So a view keeps
the tensor and the function that makes the view. ``operators.gathered`` calls it on the gathered tensor when an operator
comes, so that what is written to the view is in the tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.devices import DeviceLike
from dataparallel.sharded import operators
from dataparallel.sharded.tensor import ShardedTensor

See: TypeAlias = Callable[[Tensor], Tensor]
"""Makes a view of a full tensor."""


class ShardedView(ShardedTensor):
    """A view of a sharded tensor. It has no shards of its own.

    Args:
        viewed: an object on the shards that is no view, and that nobody else has: it keeps its shape and its shards.
        see: makes the view of the full tensor.
    """

    _viewed: ShardedTensor
    _see: See

    @staticmethod
    def __new__(cls, viewed: ShardedTensor, see: See) -> ShardedView:
        like = see(on_meta(viewed))
        made: ShardedView = _torch.make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=viewed._shards[0].device
        )
        _torch.refuse_data_pointers(made)
        made._viewed, made._see = viewed, see
        return made

    _find_operator = staticmethod(operators.of_views)

    # What operators and units read of every sharded tensor. The placement equals that of no tensor that is divided.
    _shards = property(lambda self: self._viewed._shards)
    _devices = property(lambda self: self._viewed._devices)
    _placement = property(lambda self: self._see)

    def _has_none(self) -> NoReturn:
        raise NotImplementedError(f"{self!r} has no shards and no placement; use its clone() or full_tensor()")

    shards = placement = property(_has_none)

    def full_tensor(self, device: DeviceLike | None = None) -> Tensor:
        return self._see(self._viewed.full_tensor(device)).clone(memory_format=torch.contiguous_format)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedView(shape={tuple(self.shape)}, dtype={self.dtype}, of={self._viewed!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        made: ShardedTensor
        memo[id(self)] = made = copy.deepcopy(self.clone())  # type: ignore[assignment]
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.detach().clone().__reduce_ex__(protocol)


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
