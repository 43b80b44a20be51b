"""The sharded tensor: one ``torch.Tensor`` whose parts lie on several devices of this process.

A `ShardedTensor` has the shape, dtype and gradient of the whole tensor and no memory of its own; the shards have. One
controller runs every operator: it calls the operator once for each device, on the shards there. What each of them does
is in ``sharded.operators``; any other raises ``TypeError`` and names `full_tensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.utils.hooks import warn_if_has_hooks

from dataparallel import _torch
from dataparallel.devices import DeviceLike, resolve
from dataparallel.sharded import methods, operators
from dataparallel.sharded.parts import copy_parts, empty_parts, join, move, split_into
from dataparallel.sharded.placements import Division, Rows, after_loading, over_of

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines

_OWN = {"_shards", "_placement", "_devices", "_zeroed"}
# torch's own, which the class overrides. Type checkers take them for the values.
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data


class ShardedTensor(Tensor):
    """A tensor whose parts lie on several devices.

    Args:
        shards: for each owner its part, on one device each: without a graph, of one dtype, of the shapes that
            ``placements.part_shapes`` gives. They are not copied, and not checked.
        placement: how the whole is divided.
        shape: the shape of the whole.
        devices: the owners, if the shards are not on them now (offloaded to the CPU, on meta). Default: the devices of
            the shards.
        requires_grad: as for any tensor.
        like: a tensor with the strides and the offset that the whole has as a view. Default: contiguous.
    """

    _shards: tuple[Tensor, ...]
    _placement: Division
    _devices: tuple[torch.device, ...]
    _zeroed = 0
    """How many times ``zero_`` was called, by ``zero_grad`` for example."""

    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(
        cls,
        shards: Sequence[Tensor],
        placement: Division,
        shape: Sequence[int],
        devices: Sequence[torch.device] | None = None,
        requires_grad: bool = False,
        like: Tensor | None = None,
    ) -> ShardedTensor:
        """Called for every result of an operator, so it checks nothing."""
        first = shards[0]
        layout = {} if like is None else {"strides": like.stride(), "storage_offset": like.storage_offset()}
        made: ShardedTensor = _torch.make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device, requires_grad=requires_grad, **layout
        )
        _torch.refuse_data_pointers(made)
        made._shards = tuple(shards)
        made._placement = placement
        if devices is None:
            devices = tuple(shard.device for shard in shards)
        made._devices = devices if isinstance(devices, tuple) else tuple(devices)
        return made

    @classmethod
    @_torch.not_traced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return operators.run(func, args, kwargs or {})

    # ---- what it consists of -----------------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """For each owner its part, without a graph. Writing to a part writes to the tensor."""
        operators.wait_for_host_reads()
        return self._shards

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The owners. One device may be listed several times. The shards may be elsewhere: on the CPU or on meta."""
        return self._devices

    @property
    def over(self) -> Machines | None:
        """The machines over which it is sharded, or ``None``. The shards and devices are those of this machine."""
        return over_of(self._devices)

    @property
    def placement(self) -> Division:
        """How the whole is divided: ``Shard(dim)`` or ``Replicate()``."""
        return self._placement

    def full_tensor(self, device: DeviceLike | None = None) -> Tensor:
        """The whole tensor on one device, in memory of its own and without a graph.

        On the CPU it is complete when the call returns; elsewhere it is ordered on the current streams. Over machines
        all of them call it, and each gets the whole.

        Args:
            device: default: where the first part is, on the first owner unless the parts have been moved.

        Raises:
            TypeError, ValueError: as ``devices.resolve``.
        """
        target = self.device if device is None else resolve(device)
        return join(self._shards, self._placement, self.shape, target, self.over)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        places = [str(shard.device) for shard in self._shards]
        owners = [str(device) for device in self._devices]
        over = "" if self.over is None else f" of {self.over.describe()}"
        now = "" if places == owners else f", now on {places[0] if len({*places}) == 1 else places}"
        gradient = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, placement={self._placement!r}, "
            f"devices={owners}{over}{now}{gradient})"
        )

    # ---- gradient and data -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> ShardedTensor | None:
        """The gradient, divided as the tensor is.

        Setting it to a tensor that is divided in another way, or not at all, raises ``TypeError`` or ``ValueError``.
        A backward pass may leave such a gradient here, as that of ``(p * 2).sum()`` does, whose operators have only
        plain tensors to work on. It is divided when it is first read.
        """
        gradient = _GRAD.__get__(self)
        if gradient is not None and not is_divided_alike(gradient, self):
            if gradient.requires_grad:
                raise RuntimeError(
                    "the gradient of a sharded tensor came undivided from a backward with create_graph=True, and its "
                    "graph would be lost if it were divided: use torch.autograd.grad, which returns it as it is"
                )
            with torch.no_grad(), operators.ordered_in_backward({shard.device for shard in self._shards}):
                divided = divided_like(gradient, self)
            _GRAD.__set__(self, divided)
            gradient = _GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            _check_divided_alike("the gradient of", gradient, self)
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)

    @property
    def data(self) -> ShardedTensor:
        """A tensor on the same shards without a graph, as of any tensor.

        After ``a.data = b`` both are on the shards of b, which has the shape, owners and placement of a. Any other b
        raises ``TypeError`` or ``ValueError``.
        """
        data: ShardedTensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, other: Tensor) -> None:
        divided = _check_divided_alike("the data of", other, self)
        _DATA.__set__(self, divided)
        self._shards = divided._shards

    # ---- copies, files -----------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"_shard_{index}" for index in range(len(self._shards))]
        return names, (self._placement, self._devices, self.requires_grad)

    @classmethod
    def __tensor_unflatten__(
        cls, inner_tensors: dict[str, Tensor], context: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> ShardedTensor:
        placement, devices, requires_grad = context
        shards = [inner_tensors[f"_shard_{index}"] for index in range(len(inner_tensors))]
        return cls(shards, placement, outer_size, devices, requires_grad)

    def __getattr__(self, name: str) -> Tensor:
        # torch reads the parts by the names that __tensor_flatten__ gives.
        index = name.removeprefix("_shard_")
        if index != name and index.isdecimal() and int(index) < len(self._shards):
            return self._shards[int(index)]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            copied: ShardedTensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError(
                "only leaves of the graph can be copied by deepcopy; this sharded tensor is the result of an operator: "
                "copy its .detach()"
            )
        with torch.no_grad():
            shards = [shard.clone() for shard in self._shards]
        made = type(self)(shards, self._placement, self.shape, self._devices, self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        made.__dict__.update(copy.deepcopy(self._attributes(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.over is not None:
            raise TypeError(
                f"{self!r} cannot be pickled: this machine has a part of its values only. Save the plain tensors of "
                "fully_shard.full_state_dict(model), which all machines call, or full_tensor()"
            )
        if isinstance(self._placement, Rows):
            with torch.no_grad():
                return divided_beside(self, self, Shard(self._placement.dim)).__reduce_ex__(protocol)
        warn_if_has_hooks(self)
        dim = None if isinstance(self._placement, Replicate) else self._placement.dim
        owners = [str(device) for device in self._devices]
        arguments = ([*self._shards], dim, tuple(self.shape), owners, self.requires_grad, self._attributes())
        return rebuild, arguments

    def _attributes(self) -> dict[str, Any]:
        """What users have set as attributes, and that it is a parameter."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def module_load(self, other: Tensor, assign: bool = False) -> Tensor:
        """What ``Module.load_state_dict`` puts in the place of this tensor, if torch is told to swap tensors.

        A plain ``other`` is divided as this tensor is.
        """
        if not assign:
            self.copy_(other)
            other = self
        return other.detach() if isinstance(other, ShardedTensor) else divided_like(other, self)


for _name, _method in methods.METHODS.items():
    setattr(ShardedTensor, _name, _method)


def is_divided_alike(one: Tensor, other: ShardedTensor) -> bool:
    """True if both are sharded, with the same owners and placement."""
    return isinstance(one, ShardedTensor) and one._devices == other._devices and one._placement == other._placement


def _check_divided_alike(role: str, tensor: object, like: ShardedTensor) -> ShardedTensor:
    """The tensor, if it can have this role for ``like``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{role} a sharded tensor is a sharded tensor; got {type(tensor).__name__}")
    if isinstance(tensor, ShardedTensor) and is_divided_alike(tensor, like) and tensor.shape == like.shape:
        return tensor
    owners = [str(device) for device in like._devices] if like.over is None else like._devices
    how = f"distribute_tensor(tensor, {owners}, {like._placement!r})"
    if not isinstance(tensor, ShardedTensor):
        raise TypeError(
            f"{role} a sharded tensor must be sharded as it is; got a plain tensor of shape {tuple(tensor.shape)} on "
            f"{tensor.device}: pass {how}, or write into the one that is there with copy_"
        )
    raise ValueError(f"{role} {like!r} must be sharded as it is; got {tensor!r}: pass {how}")


def fill_parts(
    parts: Sequence[Tensor], placement: Division, tensor: Tensor, over: Machines | None, non_blocking: bool = False
) -> None:
    """Copies the values of ``tensor``, plain or sharded in any way, into parts of its shape that are placed so."""
    if isinstance(tensor, ShardedTensor):
        sources, of = tensor._shards, tensor._placement
        copy_parts(parts, placement, sources, of, tensor.shape, non_blocking, to_over=over, of_over=tensor.over)
    else:
        split_into(parts, placement, tensor.detach(), non_blocking, over)


def divided_like(tensor: Tensor, like: ShardedTensor) -> ShardedTensor:
    """The values of ``tensor``, plain or sharded in any way, divided as ``like`` is, with parts where its parts are."""
    if tensor.shape != like.shape:
        raise ValueError(f"expected a tensor of the shape {tuple(like.shape)} of {like!r}; got {tuple(tensor.shape)}")
    return divided_beside(tensor, like, like._placement)


def divided_beside(
    tensor: Tensor, like: ShardedTensor, placement: Division, places: Sequence[torch.device] | None = None
) -> ShardedTensor:
    """The values of ``tensor``, plain or sharded in any way, divided so. ``places``: those of the parts of ``like``."""
    places = [shard.device for shard in like._shards] if places is None else places
    parts = empty_parts(tensor.shape, placement, places, tensor.dtype, like.over)
    fill_parts(parts, placement, tensor, like.over)
    return ShardedTensor(parts, placement, tensor.shape, like._devices)


def rebuild(
    shards: Sequence[Tensor],
    dim: int | None,
    shape: Sequence[int],
    owners: Sequence[str],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> ShardedTensor:
    """The tensor that was pickled. Files name this function, so it keeps its name and its arguments.

    Where ``map_location`` has put the shards, and who the owners are then: ``placements.after_loading``.
    """
    placement = Replicate() if dim is None else Shard(dim)
    places = [shard.device for shard in shards]
    devices = after_loading([torch.device(owner) for owner in owners], places)
    if all(place.type not in ("cpu", "meta") for place in places):
        shards = [_on(device, shard) for device, shard in zip(devices, shards, strict=True)]
    made = ShardedTensor(shards, placement, shape, devices, requires_grad)
    made.__dict__.update(attributes)
    return made


def _on(device: torch.device, shard: Tensor) -> Tensor:
    if shard.device == device:
        return shard
    moved = torch.empty_like(shard, device=device)
    move(moved, shard)
    return moved


torch.serialization.add_safe_globals([rebuild])
