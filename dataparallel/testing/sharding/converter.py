"""Which tensors are distributed, in which ways; `ShardingConverter` makes a call's arguments in every combination."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import is_tensor_like

from dataparallel import _torch
from dataparallel.batches.structures import children_of, container_of, leaves
from dataparallel.devices import DeviceLike
from dataparallel.testing.sharding.targets import Target, target_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dataparallel.sharded.placements import Placement
    from dataparallel.testing.sharding.on_devices import Placements


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


class ShardingConverter:
    """An iterator over the arguments of a call, once for each combination of placements of its tensors.

    A tensor is replicated, or cut along any dimension of two or more rows; a 0-dim one is replicated. Tensors are found
    in nested tuples, lists, dicts, dataclasses and everything else that ``dataparallel.scatter`` looks into. Each
    combination has new tensors: the operator may write to them. They are leaves; parameters stay parameters. A tensor
    that occurs twice is distributed once, so that both places have the same object.

    Tensors that cannot be distributed are passed as they are: sparse, quantised, nested, meta and functional ones,
    those with a conjugate or negative bit, subclasses, and other objects with ``__torch_function__``.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        devices: a list of devices gives this library's `ShardedTensor`; a ``DeviceMesh`` gives torch's ``DTensor``.
            Every rank of the mesh passes the same values. ``None``: two accelerators, or else two slots on the CPU.
        even_only: cut only where all parts have the same size.
        replicate_only: cut nothing.

    Attributes:
        hit: how many tensors have been distributed so far, in all combinations.
        miss: how many were passed as they are.
        combination: for each tensor that is distributed, by its place, the placements that it has now: a tuple with one
            for each dimension of the mesh. A tensor with two places is named by both.

    Raises:
        TypeError: an argument says that it is a tensor, and torch's functions would not take it for one.
        ValueError: an argument contains itself.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        devices: Sequence[DeviceLike] | DeviceMesh | None = None,
        *,
        even_only: bool = False,
        replicate_only: bool = False,
    ) -> None:
        self.hit = 0
        self.miss = 0
        self.combination: dict[str, Placements] = {}
        self.target: Target = target_of(devices)
        self._arguments = (tuple(args), dict(kwargs))
        self._leaves = flattened(*self._arguments)
        tensors = [(path, value) for path, value in self._leaves if looks_like_a_tensor(value)]
        self._missed = sum(not can_be_distributed(value) for _, value in tensors)
        self._hits = len(tensors) - self._missed
        self._names: dict[int, str] = {}
        self._choices: dict[int, list[Placements]] = {}
        for path, value in tensors:
            if not can_be_distributed(value):
                continue
            if id(value) in self._names:
                self._names[id(value)] += f" is {path}"
                continue
            self._names[id(value)] = path
            may_cut = not replicate_only and value.dim() > 0 and self.target.can_carry(value.dtype)
            self._choices[id(value)] = placements_of(
                value.shape, self.target.parts, even_only=even_only, may_cut=may_cut
            )
        self._combinations = itertools.product(*self._choices.values())

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return self

    def __next__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        chosen = dict(zip(self._choices, next(self._combinations), strict=True))
        self.combination = {self._names[key]: placements for key, placements in chosen.items()}
        made: dict[int, Tensor] = {}
        for _, value in self._leaves:
            if id(value) in chosen and id(value) not in made:
                made[id(value)] = self._distributed(value, chosen[id(value)])
        self.hit += self._hits
        self.miss += self._missed
        return replaced(*self._arguments, made)

    def successful(self) -> bool:
        """True if tensors have been distributed, and none was passed as it is."""
        return self.hit > 0 and self.miss == 0

    def _distributed(self, tensor: Tensor, placements: Placements) -> Tensor:
        distributed = self.target.distribute(tensor, placements)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(distributed, requires_grad=tensor.requires_grad)
        return distributed


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and values of everything in the arguments that is no container, in order."""
    named = (found for name, value in kwargs.items() for found in leaves(value, name))
    return [*leaves(args, "args"), *named]


def replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], others: Mapping[int, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other values in the place of those whose ids are the keys of ``others``."""
    return _replaced(args, others), {name: _replaced(value, others) for name, value in kwargs.items()}


def _replaced(obj: Any, others: Mapping[int, Any]) -> Any:
    """A structure in which nothing is replaced stays the same object."""
    children = children_of(obj, "")
    if children is None:
        return others.get(id(obj), obj)
    new = [_replaced(child, others) for _, child in children]
    if all(one is other for one, (_, other) in zip(new, children, strict=True)):
        return obj
    container = container_of(obj)
    assert container is not None
    return container.rebuild(obj, new)
