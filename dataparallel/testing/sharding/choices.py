"""Which tensors can be distributed, and which placements each of them can have. `ShardingConverter` asks.

Nothing is distributed here. Placements are those of ``torch.distributed.tensor``, for both kinds of targets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import is_tensor_like

from dataparallel import _torch

if TYPE_CHECKING:
    from dataparallel.sharded.placements import Placement

__all__ = ["Placements", "can_be_distributed", "looks_like_a_tensor", "placements_of"]

Placements: TypeAlias = "tuple[Placement, ...]"
"""How one tensor is distributed: a placement for each dimension of the mesh. A list of devices has one dimension."""


def looks_like_a_tensor(value: Any) -> bool:
    """True for tensors, and for other objects that take part in ``__torch_function__``.

    Raises:
        TypeError: the object claims to be a tensor, and torch's functions would not take it for one.
    """
    looks = is_tensor_like(value) and not isinstance(value, type)
    if not looks and isinstance(value, Tensor):
        kind = type(value)
        raise TypeError(
            f"an object of the type {kind.__module__}.{kind.__qualname__} says that it is a torch.Tensor, but has no "
            "__torch_function__: pass a tensor, or an object that does not claim to be one"
        )
    return looks


def can_be_distributed(value: Any) -> bool:
    """True for dense tensors and parameters of torch's own classes that hold their values themselves.

    Not for sparse, quantised, nested, mkldnn, meta, lazy and functional tensors, for those that are conjugated or
    negated when they are read, for those of torch.func's transforms, and for subclasses, sharded tensors included.
    """
    return type(value) in (Tensor, nn.Parameter) and not (
        value.layout is not torch.strided
        or value.is_quantized
        or value.is_nested
        or value.is_conj()
        or value.is_neg()
        or value.device.type in ("lazy", "meta")
        or _torch.is_functional_tensor(value)
        or _torch.is_functorch_tensor(value)
    )


def placements_of(shape: Sequence[int], parts: Sequence[int], *, even_only: bool, may_cut: bool) -> list[Placements]:
    """All ways to place a tensor of this shape; replicated on all devices is the first.

    Args:
        shape: of the whole tensor. A dimension of one row or none is not cut.
        parts: into how many parts each dimension of the mesh cuts.
        even_only: whether all parts must be of one size.
        may_cut: whether the tensor may be cut at all.
    """
    from torch.distributed.tensor import Replicate, Shard

    dims = [dim for dim, rows in enumerate(shape) if rows > 1] if may_cut else []
    each: list[Placement] = [Replicate(), *(Shard(dim) for dim in dims)]
    found = itertools.product(*[each] * len(parts))
    return [placements for placements in found if not even_only or _is_even(shape, placements, parts)]


def _is_even(shape: Sequence[int], placements: Placements, parts: Sequence[int]) -> bool:
    return all(
        rows % math.prod(count for placement, count in zip(placements, parts, strict=True) if placement.is_shard(dim))
        == 0
        for dim, rows in enumerate(shape)
    )
