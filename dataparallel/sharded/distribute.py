"""Whole tensors become sharded ones: by `distribute_tensor`, in full states, and in what optimizers load.

torch knows no protocol for full states: ``get_model_state_dict`` and its relatives would take a sharded tensor for a
plain one. So two of their functions are wrapped when the first tensor is divided.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import _torch
from dataparallel.devices import CPU, DeviceLike, resolve_each
from dataparallel.sharded.parts import empty_parts
from dataparallel.sharded.placements import Owners, Placement, Shard, check_placement, over_of
from dataparallel.sharded.tensor import ShardedTensor, divided_beside, divided_like, fill_parts, is_divided_alike

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
    _torch.wrap_full_states(_gathering, _distributing)
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


# ---- full states -----------------------------------------------------------------------------------------------------


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that makes a full state from a sharded one, for ours too. Over machines it is collective."""

    def gather_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        device = CPU if kwargs.get("cpu_offload") else None

        def full(leaf: Any) -> Any:
            return leaf.full_tensor(device) if isinstance(leaf, ShardedTensor) else leaf

        return gather(_torch.pytree.tree_map(full, state_dict), *args, **kwargs)

    return gather_state_dict


def _distributing(distribute: Callable[..., None]) -> Callable[..., None]:
    """torch's function that divides a full state as the local one is, for ours too. No device has a whole tensor."""

    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        ours = {
            key: value
            for key, value in local.items()
            if isinstance(value, ShardedTensor) and isinstance(full.get(key), Tensor) and full[key].shape == value.shape
        }
        distribute({key: value for key, value in full.items() if key not in ours}, local, *args, **kwargs)
        for key, like in ours.items():
            places = like._devices if like.is_meta else None  # meta has no memory
            local[key] = divided_beside(full[key], like, like._placement, places)

    return distribute_state_dict


# ---- the state of optimizers -----------------------------------------------------------------------------------------

# ``optimizer.load_state_dict`` puts what it is given on the parameter's device and leaves it whole. A step would write
# sharded results into it. So a hook that torch runs before every step of every optimizer divides what is whole, and a
# hook of the optimizer does so after each later load.

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as one number for a parameter, whatever its shape."""

_lock = threading.Lock()
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""For each optimizer that has made a step, how many groups it had."""

_watched: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
"""Optimizers whose loads are followed."""


def counters(states: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> Collection[str]:
    """The names of numbers that an optimizer keeps plain, also for a 0-dim parameter, where they have its shape.

    A name is one if its value is 0-dim beside a parameter that is not.
    """
    return _COUNTERS | {
        name
        for parameter, state in states
        for name, value in state.items()
        if parameter.dim() and isinstance(value, Tensor) and not value.dim()
    }


def sharded_value(value: Any, parameter: Tensor) -> Any:
    """A value of the parameter's state, sharded as the parameter if it is sharded and the value has its shape."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor) or parameter.is_meta:
        return value
    if value.shape != parameter.shape or is_divided_alike(value, parameter):
        return value
    return divided_like(value, parameter)


def _shard(optimizer: Optimizer) -> None:
    """Divides what is whole in the state of the optimizer."""
    states: list[tuple[Tensor, MutableMapping[str, Any]]] = [
        (parameter, optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    ]
    plain = counters(states)
    for parameter, state in states:
        for name in state.keys() - plain:
            state[name] = sharded_value(state[name], parameter)


@_torch.not_traced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before each step of every optimizer. It looks at parameters once, and again when there are more groups."""
    groups = optimizer.param_groups
    if _seen.get(optimizer) == len(groups):
        return
    if any(isinstance(parameter, ShardedTensor) for group in groups for parameter in group["params"]):
        # Sharded tensors are in no graph, so the compiler would look through a step in vain, and compile scraps of it.
        _torch.leave_alone(inspect.unwrap(type(optimizer).step))
        _shard(optimizer)
        with _lock:
            if optimizer not in _watched:
                optimizer.register_load_state_dict_post_hook(_shard)
                _watched[optimizer] = None
    with _lock:
        _seen[optimizer] = len(groups)


register_optimizer_step_pre_hook(_before_step)
