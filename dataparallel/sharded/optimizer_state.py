"""The state of optimizers over sharded parameters: values that are whole become sharded as their parameter is.

``optimizer.load_state_dict`` puts what it is given on the parameter's device and leaves it whole. A step cannot use
that: it would write sharded results into plain tensors. So a hook that torch runs before every step of every optimizer
divides what is whole, and a hook of the optimizer does so after each later load. ``forms.full_state`` divides the
state before it is loaded, so that no device ever has it whole.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import _torch
from dataparallel.sharded.tensor import ShardedTensor, divided_like, is_divided_alike

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

    Args:
        states: each parameter with its state.
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
