"""Operators on lists of tensors, which optimizers use: one call for each owner, with all tensors of the list.

These are ``_foreach_*`` of pointwise operators, ``_fused_*`` of optimizers, and the check of gradient scaling. A list
may hold sharded tensors of several sets of owners, and plain ones: each set is a group with calls of its own. As little
Python as possible runs for each tensor. ``reductions`` has norms and maxima of lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import NeedsWhole, Operator, refusal, register, register_rule
from dataparallel.sharded.operators.layout import on_each, parts_of, single_value, whole
from dataparallel.sharded.parts import from_all
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten

NOT_TAGGED = frozenset({"copy", "zero"})
"""Pointwise operators on lists whose operator on one tensor lacks the tag."""


@register_rule
def _rule(func: OpOverload) -> Operator | None:
    name = func.overloadpacket.__name__
    if name.startswith("_fused_") and name.removesuffix("_").removeprefix("_fused_") in _OPTIMIZERS:
        return on_lists
    if not name.startswith("_foreach_"):
        return None
    single = name.removeprefix("_foreach_").removesuffix("_")
    return on_lists if single in NOT_TAGGED or _is_pointwise(single) else None


_OPTIMIZERS = frozenset({"adam", "adamw", "sgd", "adagrad"})


def _is_pointwise(name: str) -> bool:
    packet = getattr(aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for overload in packet.overloads()
        if overload in ("default", "Tensor", "Scalar", "Tensor_Tensor")
    )


class _Signature(NamedTuple):
    """Which arguments of an operator are lists with one item for each tensor.

    Attributes:
        lists: their positions.
        written: for each list whose tensors the operator writes to its position and name. Optimizers write to gradients
            only to take the scale out, and never to steps.
        single_values: positions of 1-dim tensors with one number for each tensor of the lists.
        returns: True if there is a list of results.
    """

    lists: tuple[int, ...]
    written: tuple[tuple[int, str], ...]
    single_values: tuple[int, ...]
    returns: bool


@cache
def _signature(func: OpOverload) -> _Signature:
    arguments = _torch.schema_of(func).arguments
    lists = [i for i, a in enumerate(arguments) if isinstance(a.type, torch.ListType)]
    infos = [(i, arguments[i].name, arguments[i].alias_info) for i in lists]
    written = [(i, name) for i, name, info in infos if info is not None and info.is_write and name != "state_steps"]
    numbers = [i for i, a in enumerate(arguments) if a.name == "scalars" and i not in lists]
    return _Signature(tuple(lists), tuple(written), tuple(numbers), bool(_torch.schema_of(func).returns))


class Group(NamedTuple):
    """Tensors of a list that have the same owners.

    Attributes:
        leads: for each of them the sharded tensor that its neighbours in other lists are divided like; none if the
            tensors are plain.
        positions: where in the list they are.
    """

    leads: list[ShardedTensor]
    positions: list[int]


def groups_of(columns: Sequence[Sequence[Any]]) -> list[Group]:
    """The tensors at each position of lists of one length, by owners."""
    if _have_same_owners(columns[0]):  # nearly always
        return [Group([*columns[0]], [*range(len(columns[0]))])]
    groups: dict[Any, Group] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        lead = None
        for value in row:
            if isinstance(value, ShardedTensor) and (lead is None or value.dim() > lead.dim()):
                lead = value
        key = None if lead is None else lead._devices
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group([], [])
        group.positions.append(position)
        if lead is not None:
            group.leads.append(lead)
    return [*groups.values()]


def _have_same_owners(values: Sequence[Any]) -> bool:
    owners: Any = None
    for value in values:
        if type(value) is not ShardedTensor:
            return False
        if owners is None:
            owners = value._devices
        elif value._devices is not owners and value._devices != owners:
            return False
    return True


def on_lists(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The operator on the parts of all tensors, for each owner."""
    signature = _signature(func)
    lists = [i for i in signature.lists if i < len(args) and len(args[i])]
    groups = groups_of([args[i] for i in lists])
    for group in groups:
        if group.leads:
            _check_written(func, signature, args, kwargs, group)
            if signature.returns and group.leads[0].over is not None:
                _check_dtypes(func, [args[i] for i in lists], group)
    # Everything is divided before anything is written: wrong arguments change nothing.
    calls = [(group, _calls(func, signature, lists, args, kwargs, group)) for group in groups]
    results: list[Any] = [None] * len(args[lists[0]])
    for group, of_owners in calls:
        made = [func(*positional, **named) for positional, named in of_owners]
        if not signature.returns:
            continue
        if not group.leads:
            parts: list[Any] = made[0]
        else:
            parts = [
                whole(func, shards, lead) for shards, lead in zip(zip(*made, strict=True), group.leads, strict=True)
            ]
        for position, result in zip(group.positions, parts, strict=True):
            results[position] = result
    for i, name in signature.written:
        if not _only_reads(name, kwargs):
            increment_version(args[i])  # torch does so for operators on one tensor only
    if func.overloadpacket.__name__ == "_foreach_zero_":
        for tensor in args[0]:
            if isinstance(tensor, ShardedTensor):
                tensor._zeroed += 1
    return results if signature.returns else None


def _only_reads(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if an optimizer does not write to its argument of this name, although it might."""
    return name == "grads" and kwargs.get("grad_scale") is None


def _check_written(
    func: OpOverload, signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any], group: Group
) -> None:
    """Raises `NeedsWhole` if the operator would write to a slice of a plain tensor."""
    for i, name in signature.written:
        column = args[i]
        if not column or _only_reads(name, kwargs):
            continue
        for position, lead in zip(group.positions, group.leads, strict=True):
            target = column[position]
            if target is lead:
                continue
            if not isinstance(target, ShardedTensor):
                raise NeedsWhole(refusal(func, f" if it writes to a plain tensor (position {position})"))
            if target.shape != lead.shape:
                why = f" if it writes a result of shape {tuple(lead.shape)} to {tuple(target.shape)}"
                raise NeedsWhole(refusal(func, why))


def _check_dtypes(func: OpOverload, columns: Sequence[Sequence[Any]], group: Group) -> None:
    """Raises `NeedsWhole` if machines might find several dtypes for a result: one only has a 0-dim part."""
    for position, lead in zip(group.positions, group.leads, strict=True):
        tensors = [column[position] for column in columns if isinstance(column[position], Tensor)]
        if lead.dim() == 0 and any(tensor.dtype != lead.dtype for tensor in tensors):
            raise NeedsWhole(refusal(func, " with 0-dim tensors of several dtypes in lists"))


def _calls(
    func: OpOverload,
    signature: _Signature,
    lists: list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: Group,
) -> list[tuple[list[Any], dict[str, Any]]]:
    """For each owner of a group the arguments of its call."""
    everything = len(group.positions) == len(args[lists[0]])
    chosen = args if everything else [_chosen(i, value, signature, lists, group) for i, value in enumerate(args)]
    if not group.leads:
        return [([*chosen], kwargs)]
    first = group.leads[0]
    owners = range(len(first._shards))
    columns: list[Sequence[Any]] = []
    for i, value in enumerate(chosen):
        if i in lists:
            columns.append(_column(func, value, group.leads))
        elif i in signature.single_values:  # torch reads the numbers on the host
            columns.append([value] * len(owners))
        else:
            columns.append(_on_each_owner(func, value, first))
    named = {name: _on_each_owner(func, value, first) for name, value in kwargs.items()}
    return [([column[i] for column in columns], {name: column[i] for name, column in named.items()}) for i in owners]


def _chosen(i: int, value: Any, signature: _Signature, lists: list[int], group: Group) -> Any:
    if i in lists:
        return [value[position] for position in group.positions]
    return value[group.positions] if i in signature.single_values else value


def _on_each_owner(func: OpOverload, value: Any, lead: ShardedTensor) -> Sequence[Any]:
    """An argument that is no list: a tensor with one element, or no tensor."""
    if isinstance(value, ShardedTensor):
        if value.dim() > 0:
            raise NeedsWhole(refusal(func, f" with one of shape {tuple(value.shape)} for all tensors of the list"))
        value = single_value(value)
    if not isinstance(value, Tensor):
        return [value] * len(lead._shards)
    if value.numel() != 1:
        raise NeedsWhole(refusal(func, f" with one of shape {tuple(value.shape)} for all tensors of the list"))
    return on_each(value, lead)


def _column(func: OpOverload, values: Sequence[Any], leads: Sequence[ShardedTensor]) -> Sequence[Sequence[Any]]:
    """For each owner its list."""
    owners = len(leads[0]._shards)
    if not isinstance(values[0], Tensor):  # numbers
        return [values] * owners
    parts: list[Any] = [
        value._shards
        for value, lead in zip(values, leads, strict=True)
        if value is lead or (type(value) is ShardedTensor and _lie_alike(value, lead))
    ]
    if len(parts) < len(values):
        if all(_is_single(value, lead) for value, lead in zip(values, leads, strict=True)):
            return _singles(values, leads[0])
        parts = [parts_of(func, value, lead) for value, lead in zip(values, leads, strict=True)]
    return [*map(list, zip(*parts, strict=True))]


def _lie_alike(value: ShardedTensor, lead: ShardedTensor) -> bool:
    return (
        (value._devices is lead._devices or value._devices == lead._devices)
        and (value._placement is lead._placement or value._placement == lead._placement)
        and value.shape == lead.shape
    )


def _is_single(value: Tensor, lead: ShardedTensor) -> bool:
    return value is not lead and value.dim() == 0 and (not isinstance(value, ShardedTensor) or lead.dim() > 0)


def _singles(values: Sequence[Tensor], lead: ShardedTensor) -> Sequence[Sequence[Tensor]]:
    """0-dim tensors, such as the steps of an optimizer, on each owner: they travel as one tensor."""
    plain = [single_value(value) if isinstance(value, ShardedTensor) else value for value in values]
    if all(shard.device == value.device for value in plain for shard in lead._shards):
        return [plain] * len(lead._shards)
    if len({(value.dtype, value.device) for value in plain}) > 1:
        return [*map(list, zip(*(on_each(value, lead) for value in plain), strict=True))]
    return [copy.unbind() for copy in on_each(torch.stack(plain), lead)]


@register(_torch.unscale)
def _unscale(func: OpOverload, gradients: list[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """Takes the scale out of gradients. ``found`` is 1 if any owner has found something that is not finite.

    Over machines it is collective, and so are the skipped steps of a scaler.
    """
    increment_version(gradients)
    for group in groups_of([gradients]):
        if not group.leads:
            func([gradients[position] for position in group.positions], found, inverse_scale)
            continue
        lead = group.leads[0]
        inverses, founds = on_each(inverse_scale, lead), on_each(found, lead)
        for i, parts in enumerate(zip(*(tensor._shards for tensor in group.leads), strict=True)):
            func([*parts], founds[i], inverses[i])
        for there in {id(copy): copy for copy in founds if copy is not found}.values():
            found.copy_(torch.maximum(found, there.to(found.device)))
        if lead.over is not None:
            found.copy_(from_all(found, lead.over).amax(0))


# torch takes its operators on lists for parameters and gradients of these types only.
for _types in (_torch.foreach_types_of_optimizers, _torch.foreach_types_of_clipping):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)
