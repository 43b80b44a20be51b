"""Operators that need several parts of a tensor at once: a matrix product, a sum along the divided dimension.

They are gathered on the device of the first part, the operator runs once, and its result is divided by the same
placement if it has the same shape, else along dimension 0; a 0-dim one is plain. What the operator writes to is divided
again. Over machines all compute the same, so random operators are refused.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.environment import says_no
from dataparallel.sharded import operators
from dataparallel.sharded.operators.layout import find_template, sharded_in
from dataparallel.sharded.placements import Replicate, Shard
from dataparallel.sharded.tensor import ShardedTensor, divided_on_owners_of, fill_shards
from dataparallel.threads.meetings import here

_lock = threading.Lock()
_named: set[str] = set()
_allowed: bool | None = None


def allow_gathers(allowed: bool | None) -> None:
    """Whether operators that need several parts of a sharded tensor may gather it on one device.

    Args:
        allowed: ``True`` lets them. ``False`` makes them raise ``TypeError`` or ``ValueError``, with the operator's
            name. ``None``, the default, lets those whose graph is not recorded, as in optimizers, with one warning for
            each operator, unless the environment variable ``DATAPARALLEL_GATHERS`` says no.

    It holds for all threads. In the ``forward`` of a replica they always raise: the parameters that it may use are
    gathered by their unit.
    """
    global _allowed
    _allowed = allowed


class GatheredView(ShardedTensor):
    """A copy that stands for a view. It cannot be written to, because that would not reach the tensor."""

    @classmethod
    @_torch.not_traced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(isinstance(value, GatheredView) for value in _written(func, args, kwargs or {})):
            raise TypeError(
                f"{func} would write to a view that was gathered, and not to the tensor that it is a view of: write to "
                "the clone() of the view, or use full_tensor() and copy_"
            )
        result = operators.run(func, args, kwargs or {})
        if not _is_view(func):
            return result
        return [*map(_cannot_be_written, result)] if isinstance(result, list) else _cannot_be_written(result)


def _cannot_be_written(view: ShardedTensor) -> GatheredView:
    return GatheredView(view._shards, view._placement, view.shape, view._devices, like=view)


@operators.register_on_wholes
def on_wholes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """The operator's result on gathered arguments. Raises ``error`` if operators may not gather or this one cannot."""
    if not _may_gather([*args, *kwargs.values()]) or not _can_gather(func):
        raise error
    # One position after the other, so that few whole tensors are in memory.
    if _is_on_lists(func) and (count := max(len(value) for value in args if isinstance(value, (list, tuple)))) > 1:
        found = [operators.run(func, _at(args, i, count), kwargs) for i in range(count)]
        return None if found[0] is None else [result for results in found for result in results]
    _warn(func)
    template = find_template(sharded_in([*args, *kwargs.values()]))
    written = [value for value in _written(func, args, kwargs) if isinstance(value, Tensor)]
    plain = [value.device for value in written if not isinstance(value, ShardedTensor)]
    device = plain[0] if plain else template.device
    wholes: dict[int, tuple[ShardedTensor, Tensor]] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            if id(value) not in wholes:
                wholes[id(value)] = value, value.full_tensor(device)
            return wholes[id(value)][1]
        return type(value)(map(gathered, value)) if type(value) in (list, tuple) else value

    results = func(*gathered(args), **{name: gathered(value) for name, value in kwargs.items()})
    for target in written:
        if isinstance(target, ShardedTensor):
            fill_shards(target._shards, target._placement, wholes[id(target)][1], target.over)
    return _divided(func, results, template, list(wholes.values()), error)


def _may_gather(arguments: list[Any]) -> bool:
    """Whether the user lets operators gather that have these arguments."""
    if here() is not None or _allowed is False:
        return False
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sharded_in(arguments))
    return bool(_allowed) or not (is_recorded or says_no("DATAPARALLEL_GATHERS"))


def _divided(
    func: OpOverload, result: Any, template: ShardedTensor, wholes: list[tuple[ShardedTensor, Tensor]], error: Exception
) -> Any:
    """What the operator returns, for what it has returned for whole tensors."""
    if isinstance(result, (list, tuple)):
        return type(result)(_divided(func, each, template, wholes, error) for each in result)
    if not isinstance(result, Tensor):
        return result
    for sharded, whole in wholes:
        if result is whole:
            return sharded
    if result.layout is not torch.strided:
        raise error
    if not result.dim() or not wholes:
        return result
    placement = template._placement if result.shape == template.shape else Shard(0)
    placement = Replicate() if isinstance(template._placement, Replicate) else placement
    made = divided_on_owners_of(result, template, placement)
    return _cannot_be_written(made) if _is_view(func) else made


def _at(args: tuple[Any, ...], i: int, count: int) -> tuple[Any, ...]:
    """The arguments of an operator on lists for one position."""
    return tuple([value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value for value in args)


def _is_on_lists(func: OpOverload) -> bool:
    return func.overloadpacket.__name__.startswith("_foreach_")


@cache
def _can_gather(func: OpOverload) -> bool:
    """False for random operators, and for those that change a tensor's shape or memory in place."""
    name = func.overloadpacket.__name__
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & {*func.tags}
    lists = [argument for argument in _torch.schema_of(func).arguments if argument.name in ("scalars", "state_steps")]
    return (
        not tags
        and not name.startswith(("_fused_", "as_strided", "set_", "resize"))
        and not (_is_on_lists(func) and any(not isinstance(argument.type, torch.ListType) for argument in lists))
    )


@cache
def _is_view(func: OpOverload) -> bool:
    """True if the result is a view of an argument."""
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in _torch.schema_of(func).arguments
    )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that the operator writes to, also those in lists."""
    for i, argument in enumerate(_torch.schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from value if isinstance(value, (list, tuple)) else [value]


def _warn(func: OpOverload) -> None:
    name = func.overloadpacket.__name__
    with _lock:
        if _allowed or name in _named:
            return
        _named.add(name)
    warnings.warn(
        f"{func} needs several parts of sharded tensors at once: they are gathered on one device, which computes the "
        "result for all. dataparallel.sharded.allow_gathers(False) makes this an error, allow_gathers(True) accepts it",
        stacklevel=6,  # the caller of the operator
    )
