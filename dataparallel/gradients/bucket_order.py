"""The order of buckets: first the reverse of the order of registration, then that in which gradients arrive.

Each machine sees an order of its own. They agree on rank 0's (``gradients.machine_sums``), because all of them launch
sums in the order of buckets.
"""

from __future__ import annotations

import weakref

from dataparallel.replicas.plan import ModulePlan


class BucketOrder:
    """The order in which the gradients of a tree arrive. It holds no tensors.

    Attributes:
        known: positions in the plan, when the order is known.
        arrived: positions of gradients in the order in which they arrived so far, while it is not.
        is_due: with machines: true when a pass has succeeded on all of them, so that rank 0 can tell its order.
    """

    def __init__(self, plan: ModulePlan | None) -> None:
        self.known: list[int] | None = None
        self.arrived: list[int] = []
        self.is_due = False
        self._tensors = [] if plan is None else [*map(weakref.ref, plan.tensors)]
        self._parameters = None if plan is None else plan.parameters
        self._recorded = [] if plan is None else recorded_in(plan)

    def is_of(self, plan: ModulePlan) -> bool:
        """True if the plan has the same tensors and the same of them need gradients."""
        return (
            len(plan.tensors) == len(self._tensors)
            and all(found() is tensor for found, tensor in zip(self._tensors, plan.tensors, strict=True))
            and plan.parameters == self._parameters
            and recorded_in(plan) == self._recorded
        )

    def found(self) -> list[int]:
        """The order as far as it was seen; the others follow as they are registered, the last first."""
        arrived = [*dict.fromkeys(self.arrived)]
        known = {*arrived}
        return [*arrived, *(i for i in reversed(self._recorded) if i not in known)]

    def learn(self, used: list[int] | None) -> bool:
        """After the first pass: sets the order to that in which gradients arrived, and returns ``True``.

        ``used``: the order that the copies of that pass had.
        """
        if self.known is not None or not self.arrived or used is not self.known:
            return False
        self.known = self.found()
        return True

    def note_pass(self) -> None:
        """A pass has succeeded on all machines."""
        self.is_due = True


def recorded_in(plan: ModulePlan) -> list[int]:
    """Positions of the tensors that need gradients."""
    return [i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad]
