"""`TensorStore` gives the replicas of a form their tensors. `FreshCopies` is the store of ``DataParallel``.

The stores of `replicate` and `fully_shard` are in ``forms``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.replicas.kept_modules import KeptModules
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.replicate import copy_tensors, make_leaves


class TensorStore(ABC):
    """Gives tensors to the replicas of one call at a time. Copying or unpickling a store gives an empty one.

    Attributes:
        are_copies: true if they are copies of the source's tensors, which then have to be on the first slot.
        stay: true if the tensors stay on the slots between calls.
        replicas: the replicas that have them, if they stay. `clear` drops these too.
    """

    are_copies = True
    stay = False
    replicas: KeptModules | None = None

    @abstractmethod
    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """Returns for each slot a list of the plan's tensors, with the source's current values.

        ``record``: the call records a graph. ``arrivals``: parameters may arrive after this returns. It launches them.
        """

    def start_afresh_after_fork(self) -> None:  # noqa: B027 - some stores have no lock
        """Called in a forked child, where a thread of the parent may have held a lock."""

    def clear(self) -> None:  # noqa: B027 - some stores do nothing
        """Drops everything."""


class FreshCopies(TensorStore):
    """Makes new tensors for each call, and keeps nothing: whatever a ``forward`` keeps of them stays as it is.

    ``as_torch``: see `copy_tensors`.
    """

    def __init__(self, as_torch: bool = False) -> None:
        self._as_torch = as_torch

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """See `TensorStore.for_call`."""
        if record:
            return copy_tensors(plan, slots, True, cap_bytes, arrivals, self._as_torch)
        return constant_copies(plan, slots, cap_bytes, arrivals)


# Tensors made in inference mode could not be used outside of it, as replicas inside ``frozen`` may be.
@torch.inference_mode(False)
@torch.no_grad()
def constant_copies(
    plan: ModulePlan, slots: list[torch.device], cap_bytes: int, arrivals: Arrivals | None = None
) -> list[list[Tensor]]:
    """Returns for each slot the plan's tensors, as leaves. See `copy_tensors`."""
    copies = copy_tensors(plan, slots, False, cap_bytes, arrivals)
    make_leaves(plan, copies)
    return copies
