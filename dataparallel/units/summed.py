"""The parameters that have got gradients in one pass of backward, and the hooks that users have put on them.

Autograd knows no graph to a sharded parameter, so it cannot run these hooks. They run here at the end of the pass, in
torch's order: those of ``register_hook`` get the gradient of this pass, and what they return takes its place; then it
is added to ``.grad``; then those of ``register_post_accumulate_grad_hook`` run. So a parameter with hooks of the first
kind keeps the sums of the pass apart from ``.grad`` until then. ``units.sums`` and ``units.deliveries`` use this file.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.sharded.tensor import ShardedTensor, divided_like, is_divided_alike

__all__ = ["Summed"]


class Summed:
    """The parameters of all units of a tree that have got gradients in one pass."""

    def __init__(self) -> None:
        self._parameters: dict[int, ShardedTensor] = {}
        self._apart: dict[int, ShardedTensor] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def note(self, parameters: Iterable[ShardedTensor]) -> None:
        """These have got gradients."""
        self._parameters.update((id(parameter), parameter) for parameter in parameters)

    def gradient_of(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """What a sum of this pass is added to, if there is one."""
        return self._apart.get(id(parameter)) if _torch.hooks_of(parameter) else parameter.grad

    def set_gradient(self, parameter: ShardedTensor, gradient: ShardedTensor) -> None:
        """Makes the first sum what later ones are added to."""
        if _torch.hooks_of(parameter):
            self._apart[id(parameter)] = gradient
        else:
            parameter.grad = gradient

    @torch.no_grad()
    def run_hooks(self) -> None:
        """Runs the hooks of all these parameters, on the current streams, which have waited for the sums.

        Raises:
            TypeError, ValueError: a hook has returned something that cannot take the place of the gradient.
        """
        for parameter in self._parameters.values():
            gradient = self._apart.pop(id(parameter), None)
            if gradient is not None:
                _accumulate(parameter, _hooked(parameter, gradient))
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)


def _hooked(parameter: ShardedTensor, gradient: ShardedTensor) -> ShardedTensor:
    """What the parameter's hooks make of its gradient."""
    for hook in [*(_torch.hooks_of(parameter) or {}).values()]:
        returned = hook(gradient)
        if returned is None:
            continue
        if not isinstance(returned, Tensor):
            raise TypeError(
                f"a hook on a parameter returns a tensor or None; {hook!r} returned {type(returned).__name__}"
            )
        if returned.dtype != gradient.dtype or returned.shape != gradient.shape:
            raise ValueError(
                f"a hook on a parameter was given a gradient of shape {tuple(gradient.shape)} and {gradient.dtype}, "
                f"and has to return one; {hook!r} returned one of shape {tuple(returned.shape)} and {returned.dtype}"
            )
        gradient = returned if is_divided_alike(returned, gradient) else divided_like(returned, gradient)  # type: ignore[assignment]
    return gradient


def _accumulate(parameter: ShardedTensor, gradient: ShardedTensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
