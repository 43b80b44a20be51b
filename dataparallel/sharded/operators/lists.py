"""`on_lists` runs an operator on lists of tensors, as optimizers do, once for each owner with all tensors of the list.

Such operators are ``_foreach_*`` of pointwise operators, ``_fused_*`` of optimizers, and the check of gradient scaling.
A list may mix plain tensors and sharded ones of several sets of owners; each set is a `SameOwners` with calls of its
own. As little Python as possible runs for each tensor. ``reductions`` has norms of lists.
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
from dataparallel.sharded.operators import NeedsWhole, Operator, refusal, register, register_rule, sharded_in
from dataparallel.sharded.operators.layout import (
    check_written,
    copies_for_owners,
    make_sharded,
    scalar_value,
    shards_for,
)
from dataparallel.sharded.shards import all_gather_stacked
from dataparallel.sharded.tensor import ShardedTensor, is_divided_alike

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


class _ListSignature(NamedTuple):
    """The positions of arguments of an operator on lists, and whether it returns a list."""

    lists: tuple[int, ...]
    written: tuple[tuple[int, str], ...]  # lists whose tensors it writes to, with their names
    single_values: tuple[int, ...]  # 1-dim tensors with one number for each tensor of the lists
    returns: bool


@cache
def _signature(func: OpOverload) -> _ListSignature:
    arguments = _torch.schema_of(func).arguments
    lists = [i for i, a in enumerate(arguments) if isinstance(a.type, torch.ListType)]
    infos = [(i, arguments[i].name, arguments[i].alias_info) for i in lists]
    # Optimizers write to gradients only to take the scale out, and never to steps.
    written = [(i, name) for i, name, info in infos if info is not None and info.is_write and name != "state_steps"]
    numbers = [i for i, a in enumerate(arguments) if a.name == "scalars" and i not in lists]
    return _ListSignature(tuple(lists), tuple(written), tuple(numbers), bool(_torch.schema_of(func).returns))


class SameOwners(NamedTuple):
    """Tensors of a list that have the same owners, at these positions of the list.

    ``templates``: for each tensor the sharded tensor at its position in one of the lists, as which the tensors there
    have to be divided; empty if the tensors are plain.
    """

    templates: list[ShardedTensor]
    positions: list[int]


def groups_of(columns: Sequence[Sequence[Any]]) -> list[SameOwners]:
    """Groups the positions of lists of one length by the owners of the tensors there."""
    if _have_same_owners(columns[0]):  # nearly always
        return [SameOwners([*columns[0]], [*range(len(columns[0]))])]
    groups: dict[Any, SameOwners] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        template = max((value for value in row if isinstance(value, ShardedTensor)), key=Tensor.dim, default=None)
        group = groups.setdefault(None if template is None else template._devices, SameOwners([], []))
        group.positions.append(position)
        if template is not None:
            group.templates.append(template)
    return [*groups.values()]


def _have_same_owners(values: Sequence[Any]) -> bool:
    owners = getattr(values[0], "_devices", None)
    return all(
        type(value) is ShardedTensor and (value._devices is owners or value._devices == owners) for value in values
    )


def on_lists(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator for each owner, on the owner's shards of all tensors."""
    signature = _signature(func)
    args = tuple(value if i in signature.lists else _plain(func, value) for i, value in enumerate(args))
    kwargs = {name: _plain(func, value) for name, value in kwargs.items()}
    lists = [i for i in signature.lists if i < len(args) and len(args[i])]
    if not lists:
        return func(*args, **kwargs)  # raises torch's own error
    groups = groups_of([args[i] for i in lists])
    for group in groups:
        if group.templates:
            _check_written(func, signature, args, kwargs, group)
            if signature.returns and group.templates[0].over is not None:
                _check_dtypes(func, [args[i] for i in lists], group)
    # All arguments are divided before any tensor is written, so a call with wrong arguments changes nothing.
    calls = [(group, _calls(func, signature, lists, args, kwargs, group)) for group in groups]
    results: list[Any] = [None] * len(args[lists[0]])
    for group, of_owners in calls:
        returned = [func(*positional, **named) for positional, named in of_owners]
        if not signature.returns:
            continue
        if not group.templates:
            of_group: list[Any] = returned[0]
        else:
            of_tensors = zip(zip(*returned, strict=True), group.templates, strict=True)
            of_group = [make_sharded(func, shards, template) for shards, template in of_tensors]
        for position, result in zip(group.positions, of_group, strict=True):
            results[position] = result
    for i, name in signature.written:
        if not _only_reads(name, kwargs):
            increment_version(args[i])  # torch does so for operators on one tensor only
    if func.overloadpacket.__name__ in ("_foreach_zero_", "_foreach_copy_"):
        for tensor in args[0]:
            if isinstance(tensor, ShardedTensor):
                tensor._overwrites += 1
    return results if signature.returns else None


def _only_reads(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if an optimizer does not write to its argument of this name, although it might."""
    return name == "grads" and kwargs.get("grad_scale") is None


def _check_written(
    func: OpOverload, signature: _ListSignature, args: tuple[Any, ...], kwargs: dict[str, Any], group: SameOwners
) -> None:
    """Raises `NeedsWhole` if the operator would write to a slice of a plain tensor."""
    for i, name in signature.written:
        column = args[i]
        if not column or _only_reads(name, kwargs):
            continue
        for position, template in zip(group.positions, group.templates, strict=True):
            if column[position] is not template:
                check_written(func, column[position], template, f" (position {position})")


def _check_dtypes(func: OpOverload, columns: Sequence[Sequence[Any]], group: SameOwners) -> None:
    """Raises `NeedsWhole` if machines might compute several dtypes for a result: only one machine has a 0-dim shard."""
    for position, template in zip(group.positions, group.templates, strict=True):
        tensors = [column[position] for column in columns if isinstance(column[position], Tensor)]
        if template.dim() == 0 and any(tensor.dtype != template.dtype for tensor in tensors):
            raise NeedsWhole(refusal(func, " with 0-dim tensors of several dtypes in lists"))


def _calls(
    func: OpOverload,
    signature: _ListSignature,
    lists: list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: SameOwners,
) -> list[tuple[list[Any], dict[str, Any]]]:
    everything = len(group.positions) == len(args[lists[0]])
    chosen = [*args]
    for i in () if everything else lists:
        chosen[i] = [args[i][position] for position in group.positions]
    for i in () if everything else signature.single_values:
        chosen[i] = args[i][group.positions]
    if not group.templates:
        return [(chosen, kwargs)]
    first = group.templates[0]
    owners = range(len(first._shards))
    columns: list[Sequence[Any]] = []
    for i, value in enumerate(chosen):
        if i in lists:
            columns.append(_column(func, value, group.templates))
        elif i in signature.single_values:  # torch reads the numbers on the host
            columns.append([value] * len(owners))
        else:
            columns.append(_on_each_owner(value, first))
    named = {name: _on_each_owner(value, first) for name, value in kwargs.items()}
    return [([column[i] for column in columns], {name: column[i] for name, column in named.items()}) for i in owners]


def _plain(func: OpOverload, value: Any) -> Any:
    """An argument that is no list: the element of a sharded 0-dim tensor, or the value itself."""
    if not isinstance(value, ShardedTensor):
        return value
    if value.dim() > 0:
        raise NeedsWhole(refusal(func, f" with one of shape {tuple(value.shape)} for all tensors of the list"))
    return scalar_value(value)


def _on_each_owner(value: Any, template: ShardedTensor) -> Sequence[Any]:
    return copies_for_owners(value, template) if isinstance(value, Tensor) else [value] * len(template._shards)


def _column(func: OpOverload, values: Sequence[Any], templates: Sequence[ShardedTensor]) -> Sequence[Sequence[Any]]:
    """For each owner the list that its call gets in the place of ``values``."""
    owners = len(templates[0]._shards)
    if not isinstance(values[0], Tensor):  # numbers
        return [values] * owners
    rows: list[Any] = [
        value._shards
        for value, template in zip(values, templates, strict=True)
        if value is template or is_divided_alike(value, template)
    ]
    if len(rows) < len(values):
        if all(_is_scalar(value, template) for value, template in zip(values, templates, strict=True)):
            return _scalars(values, templates[0])
        rows = [shards_for(func, value, template) for value, template in zip(values, templates, strict=True)]
    return [*map(list, zip(*rows, strict=True))]


def _is_scalar(value: Tensor, template: ShardedTensor) -> bool:
    return value is not template and value.dim() == 0 and (not isinstance(value, ShardedTensor) or template.dim() > 0)


def _scalars(values: Sequence[Tensor], template: ShardedTensor) -> Sequence[Sequence[Tensor]]:
    """Copies 0-dim tensors, such as the steps of an optimizer, to each owner. They travel as one stacked tensor."""
    plain = [scalar_value(value) if isinstance(value, ShardedTensor) else value for value in values]
    if all(shard.device == value.device for value in plain for shard in template._shards):
        return [plain] * len(template._shards)
    if len({(value.dtype, value.device) for value in plain}) > 1:
        return [*map(list, zip(*(copies_for_owners(value, template) for value in plain), strict=True))]
    return [copy.unbind() for copy in copies_for_owners(torch.stack(plain), template)]


@register(_torch.unscale)
def _unscale(func: OpOverload, gradients: list[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """Takes the scale out of gradients. Sets ``found`` to 1 if an element of any shard is not finite.

    Over machines the call is collective, so all machines of a scaler skip the same steps.
    """
    if [*sharded_in([found, inverse_scale])]:
        raise NeedsWhole(refusal(func, " with a sharded scale"))
    increment_version(gradients)
    for group in groups_of([gradients]):
        if not group.templates:
            func([gradients[position] for position in group.positions], found, inverse_scale)
            continue
        template = group.templates[0]
        inverses, founds = copies_for_owners(inverse_scale, template), copies_for_owners(found, template)
        for i, shards in enumerate(zip(*(tensor._shards for tensor in group.templates), strict=True)):
            func([*shards], founds[i], inverses[i])
        for of_device in {id(copy): copy for copy in founds if copy is not found}.values():
            found.copy_(torch.maximum(found, of_device.to(found.device)))
        if template.over is not None:
            found.copy_(all_gather_stacked(found, template.over).amax(0))


# torch takes its operators on lists for parameters and gradients of these types only.
for _types in (_torch.foreach_types_of_optimizers, _torch.foreach_types_of_clipping):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)
