"""`distribute_tensor` makes a sharded tensor of a plain one. The file also divides full states and optimizer states.

torch has no protocol for full states: ``get_model_state_dict`` and its relatives would take a sharded tensor for a
plain one. So two of torch's functions are wrapped when the first tensor is divided.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.devices import CPU, DeviceLike, resolve_each
from dataparallel.optimizer_steps import before_steps
from dataparallel.sharded.placements import Owners, Placement, Replicate, Shard, check_placement, over_of
from dataparallel.sharded.shards import empty_shards
from dataparallel.sharded.tensor import ShardedTensor, divided_on_owners_of, fill_shards

_ON_META = torch.device("meta")


@torch.no_grad()
def distribute_tensor(
    tensor: Tensor,
    devices: Sequence[DeviceLike],
    placement: Placement = Shard(0),  # noqa: B008 (immutable)
    *,
    requires_grad: bool | None = None,
) -> ShardedTensor:
    """Makes a sharded tensor with the values of ``tensor``, in memory of its own. The result is a leaf of the graph.

    Args:
        tensor: dense, of any shape and dtype, on any device. The shards of a tensor on meta stay there. A sharded
            tensor is divided anew.
        devices: the owners, in the order of the shards. A device may be listed several times. With
            ``placements.Owners`` the tensor is sharded over machines: all machines call this with the same values, and
            each keeps its own shards. Nothing is sent, unless ``tensor`` is itself sharded over machines.
        placement: ``Shard(dim)`` or ``Replicate()``.
        requires_grad: default: as ``tensor``.

    Raises:
        TypeError: not a dense tensor of torch's own classes or a sharded one; a placement of another class.
        ValueError: ``devices`` is empty or has a device that the machine lacks, or the tensor lacks the dimension.
    """
    _check_dense(tensor)
    requires_grad = checked("requires_grad", requires_grad, bool, None)
    _torch.wrap_full_states(_wrap_gather, _wrap_distribute)
    over = over_of(devices)
    owners = resolve_each(devices) if over is None else Owners(resolve_each(devices), over)
    placement = check_placement(placement, tensor.shape)
    places = [_ON_META] * len(owners) if tensor.is_meta else owners
    shards = empty_shards(tensor.shape, placement, places, tensor.dtype, over)
    if not tensor.is_meta:
        fill_shards(shards, placement, tensor, over)
    wants_gradient = tensor.requires_grad if requires_grad is None else requires_grad
    return ShardedTensor(shards, placement, tensor.shape, owners, wants_gradient)


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


# ---- full states -----------------------------------------------------------------------------------------------------


def _wrap_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Makes torch's function that gathers a full state take sharded tensors too. Over machines it is collective."""

    def gather_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        device = CPU if kwargs.get("cpu_offload") else None

        def full(leaf: Any) -> Any:
            return leaf.full_tensor(device) if isinstance(leaf, ShardedTensor) else leaf

        return gather(_torch.pytree.tree_map(full, state_dict), *args, **kwargs)

    return gather_state_dict


def _wrap_distribute(distribute: Callable[..., None]) -> Callable[..., None]:
    """Makes torch's function that divides a full state take sharded tensors too. No device gets a full tensor."""

    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        sharded = {
            key: value
            for key, value in local.items()
            if isinstance(value, ShardedTensor) and isinstance(full.get(key), Tensor) and full[key].shape == value.shape
        }
        distribute({key: value for key, value in full.items() if key not in sharded}, local, *args, **kwargs)
        for key, like in sharded.items():
            places = like._devices if like.is_meta else None  # shards on meta get memory on their owners
            local[key] = divided_on_owners_of(full[key], like, like._placement, places)

    return distribute_state_dict


# ---- the state of optimizers -----------------------------------------------------------------------------------------

# ``optimizer.load_state_dict`` copies the plain tensors of a state to the parameter's device. A step would then write
# sharded results into plain tensors. So a hook that torch runs before every step of every optimizer divides the state,
# and a hook of the optimizer does so after each later load.

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries that are one number for a parameter of any shape in the states of torch's optimizers."""

_lock = threading.Lock()
_group_counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""For each optimizer that has made a step, how many groups it had then."""


def counters(states: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> Collection[str]:
    """The names of state entries that are plain numbers: 0-dim for some parameter that is not 0-dim."""
    return _COUNTERS | {
        name
        for parameter, state in states
        for name, value in state.items()
        if parameter.dim() and isinstance(value, Tensor) and not value.dim()
    }


def sharded_value(value: Any, parameter: Tensor) -> Any:
    """A tensor of a parameter's state, divided on the owners of the parameter if that is sharded.

    One of the parameter's shape is divided alike, and a larger one, such as a history of all parameters, along
    dimension 0. Smaller ones stay plain, as optimizers make them by ``new_zeros`` of another shape.
    """
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor) or parameter.is_meta:
        return value
    placement = parameter._placement
    if value.shape != parameter.shape:
        if not value.dim() or (value.numel() < parameter.numel() and not isinstance(value, ShardedTensor)):
            return value
        placement = placement if isinstance(placement, Replicate) else Shard(0)
    if isinstance(value, ShardedTensor) and (value._devices, value._placement) == (parameter._devices, placement):
        return value
    return divided_on_owners_of(value, parameter, placement)


def _shard_state(optimizer: Optimizer) -> None:
    states: list[tuple[Tensor, MutableMapping[str, Any]]] = [
        (parameter, optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    ]
    plain = counters(states)
    for parameter, state in states:
        for name in state.keys() - plain:
            state[name] = _torch.pytree.tree_map(partial(sharded_value, parameter=parameter), state[name])


@before_steps
def _before_step(optimizer: Optimizer) -> None:
    """Runs before each step of every optimizer. It checks the parameters at first, and again if groups were added."""
    groups = optimizer.param_groups
    if _group_counts.get(optimizer) == len(groups):
        return
    if any(isinstance(parameter, ShardedTensor) for group in groups for parameter in group["params"]):
        # The compiler traces no sharded tensor. So it would compile only scraps of a step.
        _torch.leave_alone(inspect.unwrap(type(optimizer).step))
        _shard_state(optimizer)
        optimizer.register_load_state_dict_post_hook(_shard_state)
    with _lock:
        _group_counts[optimizer] = len(groups)
