"""`distribute_tensor`: from a plain tensor to a sharded one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dataparallel.devices import DeviceLike, resolve_each
from dataparallel.sharded import checkpointed
from dataparallel.sharded.parts import empty_parts
from dataparallel.sharded.placements import Owners, Placement, Shard, check_placement, over_of
from dataparallel.sharded.tensor import ShardedTensor, fill_parts

_ON_META = torch.device("meta")


@torch.no_grad()
def distribute_tensor(
    tensor: Tensor,
    devices: Sequence[DeviceLike],
    placement: Placement = Shard(0),  # noqa: B008 (immutable)
    *,
    requires_grad: bool | None = None,
) -> ShardedTensor:
    """A sharded tensor with the values of ``tensor``, in memory of its own: a leaf, whatever ``tensor`` is.

    Args:
        tensor: dense, of any shape and dtype, on any device. The parts of a tensor on meta stay there. A sharded tensor
            is divided anew.
        devices: the owners, in the order of the parts. A device may be listed several times. With
            ``placements.Owners`` the tensor is sharded over machines: all call this with the same values, of which each
            keeps its parts. Nothing is sent, unless ``tensor`` is itself sharded over machines.
        placement: ``Shard(dim)`` or ``Replicate()``.
        requires_grad: default: as ``tensor``.

    Raises:
        TypeError: not a dense tensor of torch's own classes or a sharded one; a placement of another class.
        ValueError: no devices, devices that the machine lacks, a dimension that the tensor lacks.
    """
    _check_dense(tensor)
    checkpointed.prepare()
    over = over_of(devices)
    owners = resolve_each(devices) if over is None else Owners(resolve_each(devices), over)
    placement = check_placement(placement, tensor.shape)
    places = [_ON_META] * len(owners) if tensor.is_meta else owners
    parts = empty_parts(tensor.shape, placement, places, tensor.dtype, over)
    if not tensor.is_meta:
        fill_parts(parts, placement, tensor, over)
    wants_gradient = tensor.requires_grad if requires_grad is None else requires_grad
    return ShardedTensor(parts, placement, tensor.shape, owners, wants_gradient)


def _check_dense(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"distribute_tensor expects a tensor; got {type(tensor).__name__}")
    if is_lazy(tensor):
        raise TypeError("distribute_tensor got an uninitialised lazy parameter; run its module once first")
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer, ShardedTensor):
        raise TypeError(f"distribute_tensor expects a plain tensor; got one of the class {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"distribute_tensor expects a dense tensor; got one that is {kind}: pass its to_dense()")
