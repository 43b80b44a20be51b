"""Which ``.grad`` gradients belong to that wait elsewhere: ``zero_grad`` drops them too.

``units.gradients`` and ``units.partial_sums`` keep gradients that are to be added later. Nobody else uses this file.
"""

from __future__ import annotations

import weakref

import torch

from dataparallel.sharded.tensor import ShardedTensor

__all__ = ["FormerGrad", "zeros_of"]


class FormerGrad:
    """A parameter's ``.grad`` as it was when gradients were held for it."""

    def __init__(self, grad: ShardedTensor) -> None:
        self._grad, self._zeroed = weakref.ref(grad), grad._zeroed

    def is_void(self, grad: ShardedTensor | None) -> bool:
        """True if the parameter's ``.grad`` is another one now, or ``zero_`` was called on it."""
        return grad is None or self._grad() is not grad or grad._zeroed != self._zeroed


def zeros_of(parameter: ShardedTensor) -> ShardedTensor:
    """Zeros on the current streams. An operator on sharded tensors would run on other streams in a backward."""
    zeros = [torch.zeros_like(shard) for shard in parameter._shards]
    return ShardedTensor(zeros, parameter.placement, parameter.shape, devices=parameter.devices)
