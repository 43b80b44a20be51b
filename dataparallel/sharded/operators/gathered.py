"""`on_wholes` runs operators that need several shards at once, such as a matrix product, on gathered tensors.

It gathers sharded arguments on the device of the first shard, runs the operator once, and divides the result: with the
same placement if it has the same shape, else along dimension 0. A 0-dim result stays plain. Tensors that were written
are divided again. Over machines all of them compute the same result, so random operators are refused.
"""

from __future__ import annotations

import threading
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.arguments import checked
from dataparallel.environment import says_no
from dataparallel.sharded import operators
from dataparallel.sharded.operators import sharded_in
from dataparallel.sharded.operators.layout import find_template
from dataparallel.sharded.placements import Replicate, Shard
from dataparallel.sharded.tensor import ShardedTensor, divided_on_owners_of, fill_shards
from dataparallel.threads.meetings import here

_lock = threading.Lock()
_warned: set[str] = set()  # names of operators
_allowed: bool | None = None


def allow_gathers(allowed: bool | None) -> None:
    """Sets whether operators that need several shards of a tensor may gather it on one device.

    Args:
        allowed: ``True``: they gather. ``False``: they raise ``NotImplementedError`` or ``ValueError``, which names the
            operator. ``None``, the default: they gather if their graph is not recorded, as in optimizers, with one
            warning for each operator, unless the environment variable ``DATAPARALLEL_GATHERS`` says no.

    The setting holds for all threads. In the ``forward`` of a replica such operators always raise, because units gather
    the parameters that a replica may use.
    """
    global _allowed
    _allowed = checked("allowed", allowed, bool, None)


class GatheredView(ShardedTensor):
    """A gathered copy in the place of a view. It refuses writes, because they would not reach the original tensor."""

    @classmethod
    @_torch.not_traced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(isinstance(value, GatheredView) for value in operators.written_values(func, args, kwargs or {})):
            raise NotImplementedError(
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
    """Runs the operator on gathered arguments. Raises ``error`` if operators may not gather or this one cannot."""
    arguments = [*args, *kwargs.values()]
    if not _can_gather(func):
        raise error
    if not _may_gather(arguments):
        if _allowed is None and here() is None and _is_recorded(arguments):
            error = type(error)(
                f"{error}, or for its gradient call dataparallel.sharded.allow_gathers(True) first. If a module "
                "computes here: its parameters are whole only while its unit runs. Call the module that was given to "
                "fully_shard, or give fully_shard this one too, before the module that holds it"
            )
        raise error
    # An operator on lists runs for one position after the other, so that few full tensors are in memory.
    if _is_on_lists(func) and (count := max(len(value) for value in args if isinstance(value, (list, tuple)))) > 1:
        of_positions = [operators.run(func, _at(args, i, count), kwargs) for i in range(count)]
        return None if of_positions[0] is None else [result for results in of_positions for result in results]
    _warn(func)
    template = find_template(sharded_in(arguments))
    written = [value for value in operators.written_values(func, args, kwargs) if isinstance(value, Tensor)]
    plain = [value.device for value in written if not isinstance(value, ShardedTensor)]
    device = plain[0] if plain else template._shards[0].device
    full_tensors: dict[int, tuple[ShardedTensor, Tensor]] = {}  # by the id of the sharded tensor

    def gathered(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            if id(value) not in full_tensors:
                full_tensors[id(value)] = value, value.full_tensor(device)
            return full_tensors[id(value)][1]
        return type(value)(map(gathered, value)) if type(value) in (list, tuple) else value

    results = func(*gathered(args), **{name: gathered(value) for name, value in kwargs.items()})
    for target in written:
        if isinstance(target, ShardedTensor):
            fill_shards(target._shards, target._placement, full_tensors[id(target)][1], target.over)
    return _divided(func, results, template, list(full_tensors.values()), error)


def _may_gather(arguments: list[Any]) -> bool:
    if here() is not None or _allowed is False:
        return False
    return bool(_allowed) or not (_is_recorded(arguments) or says_no("DATAPARALLEL_GATHERS"))


def _is_recorded(arguments: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sharded_in(arguments))


def _divided(
    func: OpOverload, result: Any, template: ShardedTensor, pairs: list[tuple[ShardedTensor, Tensor]], error: Exception
) -> Any:
    """Divides a result of the operator. ``pairs``: the sharded arguments with their full tensors."""
    if isinstance(result, (list, tuple)):
        return type(result)(_divided(func, each, template, pairs, error) for each in result)
    if not isinstance(result, Tensor):
        return result
    for sharded, full in pairs:
        if result is full:
            return sharded
    if result.layout is not torch.strided:
        raise error
    if not result.dim() or not pairs:
        return result
    placement = template._placement if result.shape == template.shape else Shard(0)
    placement = Replicate() if isinstance(template._placement, Replicate) else placement
    divided = divided_on_owners_of(result, template, placement)
    return _cannot_be_written(divided) if _is_view(func) else divided


def _at(args: tuple[Any, ...], i: int, count: int) -> tuple[Any, ...]:
    """The arguments with which an operator on lists runs for position ``i`` alone."""
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
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in _torch.schema_of(func).arguments
    )


def _warn(func: OpOverload) -> None:
    name = func.overloadpacket.__name__
    with _lock:
        if _allowed or name in _warned:
            return
        _warned.add(name)
    warnings.warn(
        f"{func} needs several parts of sharded tensors at once: they are gathered on one device, which computes the "
        "result for all. dataparallel.sharded.allow_gathers(False) makes this an error, allow_gathers(True) accepts it",
        stacklevel=6,  # the caller of the operator
    )
