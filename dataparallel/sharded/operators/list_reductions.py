"""Reductions of each tensor of a list, which clipping of gradients uses: one call for each owner.

Results are plain 0-dim tensors on the first owner, as those of ``reductions`` are. What the owners send there travels
as one tensor for each of them; over machines all results of a dtype travel at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.across import joined, of_all_owners
from dataparallel.sharded.operators import register
from dataparallel.sharded.operators.lists import Group, groups_of
from dataparallel.sharded.operators.reductions import combined_norm, summed_in
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.tensor import ShardedTensor


@register(_torch.foreach_norm)
def norms(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The norm of each tensor."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")

    def reduce(parts: list[Tensor]) -> list[Tensor]:
        return func(parts, order, dtype=summed_in(dtype or parts[0].dtype))

    def finish(partials: Tensor, given: torch.dtype) -> Tensor:
        return combined_norm(partials, order).to((dtype or given).to_real())

    # A norm of nothing is 0; the smallest of no absolute values is above all others.
    neutral = float("inf") if order < 0 else 0.0
    return _reduced(func, args, kwargs, reduce, finish, lambda dtype: neutral)


@register(_torch.foreach_max)
def maxima(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The largest element of each tensor."""
    return _reduced(func, args, kwargs, func, lambda partials, dtype: partials.amax(0), _lowest)


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _reduced(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reduce: Callable[[list[Tensor]], list[Tensor]],
    finish: Callable[[Tensor, torch.dtype], Tensor],
    neutral: Callable[[torch.dtype], float],
) -> list[Tensor]:
    """The result for each tensor of the list.

    Args:
        reduce: the results of one owner's parts.
        finish: the results of tensors of a dtype, from a tensor (owners, tensors) of those of the parts.
        neutral: what stands for an empty part of this dtype.
    """
    tensors = args[0]
    results: list[Any] = [None] * len(tensors)
    for group in groups_of(func, [tensors]):
        if not group.leads:
            found = func([tensors[position] for position in group.positions], *args[1:], **kwargs)
            for position, result in zip(group.positions, found, strict=True):
                results[position] = result
        for alike in _alike(group) if group.leads else []:
            parts = zip(*(_parts(tensor, neutral) for tensor in alike.leads), strict=True)
            partials = joined([torch.stack(reduce([*of_owner])) for of_owner in parts])
            over = alike.leads[0].over
            if over is not None and not isinstance(alike.leads[0]._placement, Replicate):
                partials = of_all_owners(partials, over)
            found = finish(partials, alike.leads[0].dtype).unbind()
            for position, result in zip(alike.positions, found, strict=True):
                results[position] = result
    return results


def _alike(group: Group) -> list[Group]:
    """The tensors of each dtype that are read on as many owners: of replicated ones only the first copy is."""
    found: dict[Any, Group] = {}
    for lead, position in zip(group.leads, group.positions, strict=True):
        key = lead.dtype, isinstance(lead._placement, Replicate)
        alike = found.setdefault(key, Group([], []))
        alike.leads.append(lead)
        alike.positions.append(position)
    return [*found.values()]


def _parts(tensor: ShardedTensor, neutral: Callable[[torch.dtype], float]) -> list[Tensor]:
    if isinstance(tensor._placement, Replicate):
        return [tensor._shards[0]]
    if tensor.numel() == 0:  # torch's own result or error for nothing
        return [*tensor._shards]
    return [part if part.numel() else part.new_full((1,), neutral(part.dtype)) for part in tensor._shards]
