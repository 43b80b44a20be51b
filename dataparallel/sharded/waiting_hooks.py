"""`hand_over` keeps a parameter's hooks and part of its gradient from torch's engine, for a unit that sums the rest.

Where a loss uses the parameter itself, as a penalty on weights does, the engine brings a part of its gradient, at any
time of the backward. Hooks have to see the whole gradient, once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor

from dataparallel import _torch

Taker: TypeAlias = Callable[[Any, Tensor], object]
"""Takes a parameter and a part of its gradient, in a backward."""


class _Replacement(OrderedDict[int, Callable[[Any], Any]]):
    """What the engine runs in place of ``waiting``, the hooks of users. It is where torch keeps hooks.

    Attributes of a tensor would not do: ``Module.to_empty`` exchanges them, but leaves the hooks.
    """

    waiting: Any = None


class WaitingHooks:
    """A descriptor for the hooks of one kind on a tensor. The engine runs them until `replace` is called.

    Args:
        of_torch: torch's descriptor.
    """

    def __init__(self, of_torch: Any) -> None:
        self._of_torch = of_torch

    def __get__(self, tensor: Any, owner: type) -> Any:
        hooks = self if tensor is None else self._of_torch.__get__(tensor)
        return hooks.waiting if isinstance(hooks, _Replacement) else hooks

    def __set__(self, tensor: Any, hooks: Any) -> None:
        present = self._of_torch.__get__(tensor)
        if isinstance(present, _Replacement):
            present.waiting = hooks
        else:
            self._of_torch.__set__(tensor, hooks)

    def replace(self, tensor: Any, hook: Callable[[Any], Any]) -> None:
        """Has the engine run ``hook`` in place of the tensor's hooks, whose handles work as before."""
        replacement = _Replacement({0: hook})
        replacement.waiting = self.__get__(tensor, type(tensor))
        self._of_torch.__set__(tensor, replacement)


ON_GRADIENT = WaitingHooks(_torch.BACKWARD_HOOKS)
AFTER_ACCUMULATION = WaitingHooks(_torch.POST_ACCUMULATE_GRAD_HOOKS)


def hand_over(parameter: Any, find_taker: WeakMethod[Callable[[], Taker | None]]) -> None:
    """Hands over what the engine would accumulate in ``parameter.grad``, and lets the parameter's hooks wait.

    ``find_taker`` is called in each backward. If it returns ``None`` or is gone, and in a backward with
    ``create_graph=True`` or of ``torch.autograd.grad``, the engine does what it does for any tensor.
    """

    def taker() -> Taker | None:
        find = find_taker()
        return None if find is None or torch.is_grad_enabled() else find()

    @_torch.not_traced
    def on_gradient(gradient: Tensor) -> Tensor | None:
        node, take = _torch.current_node(), taker()
        if take is None or _torch.is_returned(node):
            for hook in [*(_torch.hooks_of(node.variable) or {}).values()]:
                returned = hook(gradient)
                gradient = gradient if returned is None else returned
            return gradient

        def before_accumulation(gradients: tuple[Tensor | None]) -> tuple[None]:
            if gradients[0] is not None:  # otherwise another thread's hook on this node has taken it
                handle.remove()
                take(node.variable, gradients[0])
            return (None,)

        handle = node.register_prehook(before_accumulation)  # runs next, and leaves nothing to accumulate
        return None

    @_torch.not_traced
    def after_accumulation(parameter: Any) -> None:
        if taker() is None:
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)

    ON_GRADIENT.replace(parameter, on_gradient)
    AFTER_ACCUMULATION.replace(parameter, after_accumulation)
