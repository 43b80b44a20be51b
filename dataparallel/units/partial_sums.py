"""Gradients of a unit that are summed over the owners, and not yet over the machines that replicate them.

``set_requires_all_reduce(False)`` leaves them here until a pass that adds all up. They wait beside ``.grad``, and are
dropped if the user throws that away. ``units.sums_over_machines`` makes and takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.units.deliveries import Group
from dataparallel.units.former_grad import FormerGrad, zeros_of

__all__ = ["PartialSums"]


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
