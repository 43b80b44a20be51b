"""`on_lists` runs an operator on lists of tensors, as optimizers do, once for each owner with all tensors of the list.

Such operators are ``_foreach_*`` of pointwise operators, ``_fused_*`` of optimizers, and the check of gradient scaling.
A list may mix plain tensors and sharded ones of several sets of owners; each set has calls of its own. As little Python
as possible runs for each tensor. ``reductions`` has norms of lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import RULES, NeedsWhole, Operator, refusal, register, sharded_in, written_arguments
from dataparallel.sharded.operators.pointwise import (
    check_written,
    copies_for_owners,
    elements,
    find_template,
    make_sharded,
    scalar_value,
    shards_for,
)
from dataparallel.sharded.shards import all_gather_stacked
from dataparallel.sharded.tensor import ShardedTensor, is_divided_alike

aten = torch.ops.aten


def _rule(func: OpOverload) -> Operator | None:
    name = func.overloadpacket.__name__.removesuffix("_")
    if name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"):
        return on_lists
    if not name.startswith("_foreach_"):
        return None
    single = name.removeprefix("_foreach_")
    packet = getattr(aten, single, None)
    is_pointwise = packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for overload in packet.overloads()
        if overload in ("default", "Tensor", "Scalar", "Tensor_Tensor")
    )
    return on_lists if is_pointwise or single in ("copy", "zero") else None  # which lack the tag


RULES.append(_rule)


def _written(func: OpOverload, kwargs: Mapping[str, Any]) -> list[int]:
    """The positions of lists whose tensors it writes to. Optimizers write to gradients only to take the scale out."""
    not_written = ("state_steps", "grads" if kwargs.get("grad_scale") is None else "")
    arguments = _torch.schema_of(func).arguments
    lists = [i for i, argument in enumerate(arguments) if isinstance(argument.type, torch.ListType)]
    return [i for i in lists if i in written_arguments(func) and arguments[i].name not in not_written]


def groups_of(columns: Sequence[Sequence[Any]]) -> list[tuple[list[int], Sequence[ShardedTensor]]]:
    """Groups the positions of lists of one length by the owners of the tensors there.

    With them come the templates: for each position the sharded tensor as which the others there have to be divided. A
    group of plain tensors has none.
    """
    owners = getattr(columns[0][0], "_devices", None)
    if all(type(value) is ShardedTensor and value._devices == owners for value in columns[0]):  # nearly always
        return [([*range(len(columns[0]))], columns[0])]
    groups: dict[Any, tuple[list[int], list[ShardedTensor]]] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        templates = [find_template(row)] if any(isinstance(value, ShardedTensor) for value in row) else []
        group = groups.setdefault(templates[0]._devices if templates else None, ([], []))
        group[0].append(position)
        group[1].extend(templates)
    return [*groups.values()]


def on_lists(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator for each owner, on the owner's shards of all tensors."""
    args = tuple(_plain(func, value) for value in args)
    kwargs = {name: _plain(func, value) for name, value in kwargs.items()}
    columns = [value for value in args if isinstance(value, (list, tuple)) and value]
    if not columns:
        return func(*args, **kwargs)  # raises torch's own error
    groups = groups_of(columns)
    # All arguments are divided before any tensor is written, so a call with wrong arguments changes nothing.
    calls = [_calls(func, args, kwargs, positions, templates) for positions, templates in groups]
    results: list[Any] = [None] * len(columns[0])
    for (positions, templates), of_owners in zip(groups, calls, strict=True):
        returned = [func(*positional, **named) for positional, named in of_owners]
        if returned[0] is not None:
            of_positions = zip(*returned, strict=True)
            for i, position in enumerate(positions):
                shards = next(of_positions)
                results[position] = make_sharded(func, shards, templates[i]) if templates else shards[0]
    for i in _written(func, kwargs):
        increment_version(args[i])  # torch does so for operators on one tensor only
    return None if results[0] is None else results


def _plain(func: OpOverload, value: Any) -> Any:
    """A tensor of one element that serves the whole list, as a plain one. Lists and all other values stay."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise refusal(func, f" with one of shape {tuple(value.shape)} for all tensors of the list")
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def _calls(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: list[int],
    templates: Sequence[ShardedTensor],
) -> list[tuple[Sequence[Any], dict[str, Any]]]:
    """The arguments of each owner's call. Raises `NeedsWhole` if it would write to a slice of a plain tensor."""
    args = tuple([v[i] for i in positions] if isinstance(v, (list, tuple)) and v else v for v in args)
    if not templates:
        return [(args, kwargs)]
    for i in _written(func, kwargs):
        for value, template in zip(args[i], templates, strict=bool(args[i])):
            if value is not template:
                check_written(func, value, template)
    columns = [_column(func, value, templates) for value in (*args, *kwargs.values())]
    count = len(args)
    return [(row[:count], dict(zip(kwargs, row[count:], strict=True))) for row in zip(*columns, strict=True)]


def _column(func: OpOverload, value: Any, templates: Sequence[ShardedTensor]) -> Sequence[Any]:
    """For each owner what its call gets in the place of ``value``, a list or an argument for the whole list."""
    if isinstance(value, Tensor):
        return copies_for_owners(value, templates[0])
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Tensor):
        return [value] * len(templates[0]._shards)
    pairs = [*zip(value, templates, strict=True)]
    rows: list[Any] = [elements(v) for v, template in pairs if v is template or is_divided_alike(v, template)]
    if len(rows) < len(value):
        if not any(v.dim() or (isinstance(v, ShardedTensor) and not template.dim()) for v, template in pairs):
            return _scalars(value, templates[0])
        rows = [shards_for(func, v, template) for v, template in pairs]
    return [*map(list, zip(*rows, strict=True))]


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
    for positions, templates in groups_of([gradients]):
        calls = _calls(func, (gradients, found, inverse_scale), {}, positions, templates)
        for of_owner, _ in calls:
            func(*of_owner)
        for of_device in {id(copy): copy for (_, copy, _), _ in calls if copy is not found}.values():
            found.copy_(torch.maximum(found, of_device.to(found.device)))
        if templates and templates[0].over is not None:
            found.copy_(all_gather_stacked(found, templates[0].over).amax(0))


# torch takes its operators on lists for parameters and gradients of these types only.
for _types in (_torch.foreach_types_of_optimizers, _torch.foreach_types_of_clipping):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)
