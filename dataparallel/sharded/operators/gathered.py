"""`on_wholes` runs operators that need several shards at once, and operators on views, on gathered tensors.

It gathers sharded arguments on the device of the first shard, runs the operator once, and divides the result: with the
same placement if it has the same shape, else along dimension 0. A 0-dim result stays plain. Tensors that were written
are divided again. Over machines all of them compute the same result, so random operators are refused.
"""

from __future__ import annotations

import threading
import warnings
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.arguments import checked
from dataparallel.environment import says_no
from dataparallel.sharded import operators
from dataparallel.sharded.operators import OF_VIEWS, refusal, register, sharded_in
from dataparallel.sharded.operators.pointwise import find_template
from dataparallel.sharded.placements import Replicate, Shard
from dataparallel.sharded.tensor import ShardedTensor, divided_on_owners_of, fill_shards
from dataparallel.sharded.view import ShardedView, on_meta
from dataparallel.threads.meetings import here

aten = torch.ops.aten

_lock = threading.Lock()
_warned: set[str] = set()  # names of operators
_allowed: bool | None = None

ONLY_COPY = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.clone.default}
"""Operators on views that compute nothing. They may gather, as copies between sharded tensors may."""


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


def on_wholes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Runs the operator on gathered arguments. Raises ``error`` if operators may not gather or this one cannot."""
    arguments = [*args, *kwargs.values()]
    if not _can_gather(func):
        raise error
    if _is_view(func):
        return _view_of(func, args, kwargs)
    if not _may_gather(func, arguments):
        if _allowed is None and here() is None and _is_recorded(arguments):
            error = type(error)(
                f"{error}, or for its gradient call dataparallel.sharded.allow_gathers(True) first. If a module "
                "computes here: its parameters are whole only while its unit runs. Call the module that was given to "
                "fully_shard, or give fully_shard this one too, before the module that holds it"
            )
        raise error
    lengths = [len(value) for value in args if isinstance(value, (list, tuple))]
    if func.overloadpacket.__name__.startswith("_foreach_") and max(lengths) > 1:
        # It runs for one position after the other, so that few full tensors are in memory.
        of_positions = [func(*_at(args, i, max(lengths)), **kwargs) for i in range(max(lengths))]
        return None if of_positions[0] is None else [result for results in of_positions for result in results]
    _warn(func)
    return _run(func, args, kwargs, error)


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    template = find_template(sharded_in([*args, *kwargs.values()]))
    written = [value for value in operators.written_values(func, args, kwargs) if isinstance(value, Tensor)]
    plain = (value.device for value in written if not isinstance(value, ShardedTensor))
    device = next(plain, template._shards[0].device)
    full_tensors: dict[int, tuple[ShardedTensor, Tensor]] = {}  # by the id of the sharded tensor
    whole = partial(_gathered, device=device, full_tensors=full_tensors)
    results = func(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
    divided_again = [full_tensors[id(target)] for target in written if isinstance(target, ShardedTensor)]
    divided = _divided(results, template, [*divided_again, *full_tensors.values()], error)
    for target, _ in divided_again:
        owner = target._viewed if isinstance(target, ShardedView) else target
        fill_shards(owner._shards, owner._placement, full_tensors[id(owner)][1], owner.over)
    return divided


def _gathered(value: Any, device: torch.device, full_tensors: dict[int, tuple[ShardedTensor, Tensor]]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_gathered(each, device, full_tensors) for each in value)
    if not isinstance(value, ShardedTensor):
        return value
    if id(value) not in full_tensors:
        if isinstance(value, ShardedView):
            full = value._see(_gathered(value._viewed, device, full_tensors))
        else:  # objects on the same shards share a full tensor
            others = [(other, full) for other, full in full_tensors.values() if not isinstance(other, ShardedView)]
            known = [full for other, full in others if other._shards is value._shards]
            full = known[0] if known else value.full_tensor(device)
        full_tensors[id(value)] = value, full
    return full_tensors[id(value)][1]


def _may_gather(func: OpOverload, arguments: list[Any]) -> bool:
    if here() is not None or (_allowed is not True and _is_recorded(arguments)):
        return False
    return _allowed or func in ONLY_COPY or not (_allowed is False or says_no("DATAPARALLEL_GATHERS"))


def _is_recorded(arguments: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sharded_in(arguments))


def _divided(result: Any, template: ShardedTensor, pairs: list[tuple[ShardedTensor, Tensor]], error: Exception) -> Any:
    """Divides a result of the operator. ``pairs``: the sharded arguments with their full tensors."""
    if isinstance(result, (list, tuple)):
        return type(result)(_divided(each, template, pairs, error) for each in result)
    if not isinstance(result, Tensor):
        return result
    for sharded, full in pairs:
        if result is full:
            return sharded
    if result.layout is not torch.strided:
        raise error
    if not result.dim() or not pairs:
        return result
    like = template._viewed if isinstance(template, ShardedView) else template
    placement = like._placement if result.shape == like.shape or isinstance(like._placement, Replicate) else Shard(0)
    return divided_on_owners_of(result, like, placement)


def _at(args: tuple[Any, ...], i: int, count: int) -> tuple[Any, ...]:
    """The arguments with which an operator on lists runs for position ``i`` alone."""
    return tuple([value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value for value in args)


@cache
def _can_gather(func: OpOverload) -> bool:
    """False for random operators, and for those that change a tensor's shape or memory in place."""
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & {*func.tags}
    return not tags and not func.overloadpacket.__name__.startswith(("_fused_", "as_strided", "set_", "resize"))


def _warn(func: OpOverload) -> None:
    name = func.overloadpacket.__name__
    with _lock:
        if _allowed or func in ONLY_COPY or name in _warned:
            return
        _warned.add(name)
    warnings.warn(
        f"{func} needs several parts of sharded tensors at once: they are gathered on one device, which computes the "
        "result for all. dataparallel.sharded.allow_gathers(False) makes this an error, allow_gathers(True) accepts it",
        stacklevel=6,  # the caller of the operator
    )


def _view_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that returns a view of its first argument, or a list of views."""
    tensor, others = args[0], args[1:]
    is_again = isinstance(tensor, ShardedView)
    viewed, see = (tensor._viewed, tensor._see) if is_again else (_second_object(func, tensor), lambda full: full)

    def see_again(full: Tensor) -> Any:
        return func(see(full), *others, **kwargs)

    seen = see_again(on_meta(viewed))
    if isinstance(seen, Tensor):
        return ShardedView(viewed, see_again)
    return [ShardedView(viewed, lambda full, at=at: see_again(full)[at]) for at in range(len(seen))]  # type: ignore[misc]


@cache
def _is_view(func: OpOverload) -> bool:
    """True if a result of the operator shares the memory of an argument that it does not write to."""
    infos = [argument.alias_info for argument in _torch.schema_of(func).arguments]
    return any(info is not None and not info.is_write for info in infos)


@register(aten.detach.default, aten.alias.default)
def _second_object(func: OpOverload, tensor: ShardedTensor) -> ShardedTensor:
    if isinstance(tensor, ShardedView):
        return ShardedView(tensor._viewed, tensor._see)
    return ShardedTensor(tensor._shards, tensor._placement, tensor.shape, tensor._devices)


@register(aten.view_as_real.default, aten.view_as_complex.default)
def _other_numbers(func: OpOverload, tensor: ShardedTensor) -> ShardedTensor:
    """Views complex numbers as pairs in a new last dimension, or such pairs as complex numbers, as optimizers do."""
    shape = (*tensor.shape, 2) if func is aten.view_as_real.default else tensor.shape[:-1]
    if isinstance(tensor._placement, Shard) and tensor._placement.dim >= min(tensor.dim(), len(shape)):
        raise refusal(func, f" of shape {tuple(tensor.shape)}, where it would cut pairs in two")
    return ShardedTensor([func(shard) for shard in tensor._shards], tensor._placement, shape, tensor._devices)


@register(aten.t_.default)
def _turn(func: OpOverload, tensor: ShardedTensor) -> ShardedTensor:
    """Turns a matrix, as ``nn.init.orthogonal_`` does. The parameters of a module keep the shapes of their layout."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.dim() != 2:
        raise refusal(func, " that are parameters or no matrices")
    placement = tensor._placement if isinstance(tensor._placement, Replicate) else Shard(1 - tensor._placement.dim)
    shape = tensor.shape[::-1]
    turned = ShardedTensor([shard.t() for shard in tensor._shards], placement, shape, tensor._devices)
    torch.Tensor.data.__set__(tensor, turned)  # type: ignore[attr-defined]  # takes the shape
    tensor._shards, tensor._placement = turned._shards, placement
    return tensor


operators.ON_WHOLES.append(on_wholes)
OF_VIEWS[aten.detach.default] = OF_VIEWS[aten.alias.default] = _second_object
