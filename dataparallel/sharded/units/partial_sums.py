"""Gradients that wait beside ``.grad``: to which ``.grad`` they belong, and sums that wait for those of other machines.

They are dropped if the user throws that ``.grad`` away.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.deliveries import Group


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


class PartialSums:
    """The partial sums of one unit. They belong to the computing streams, which are current where it is used.

    Args:
        groups: the parameters that need gradients, for each dtype.
        parameters: of the unit.
        totals: for each dtype the parts of all owners on this machine.
        present: positions of the parameters that have gradients.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        parameters: Sequence[ShardedTensor],
        totals: Sequence[Sequence[Tensor]],
        present: Sequence[int],
    ) -> None:
        self._groups, self._parameters, self.totals = groups, parameters, totals
        self._former: dict[int, FormerGrad] = {}
        for i in present:
            if parameters[i].grad is None:
                parameters[i].grad = zeros_of(parameters[i])
            grad = parameters[i].grad
            assert grad is not None
            self._former[i] = FormerGrad(grad)

    @property
    def present(self) -> Mapping[int, object]:
        """Positions of the parameters that have gradients."""
        return self._former

    def drop_void(self) -> None:
        """Drops gradients whose ``.grad`` the user has thrown away or zeroed."""
        for i in [i for i, former in self._former.items() if former.is_void(self._parameters[i].grad)]:
            del self._former[i]
            for (kept, layout, _), of_owners in zip(self._groups, self.totals, strict=True):
                if i in kept:
                    place = layout.places[kept.index(i)]
                    for flat in of_owners:
                        flat[place.start : place.start + place.numel].zero_()
