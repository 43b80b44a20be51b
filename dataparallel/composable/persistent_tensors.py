"""The parameters and buffers of persistent replicas: made once, given the source's values at every forward.

This file decides whether a call can use them again. ``persistent_copies`` makes them, ``persistent_values`` gives them
their values.

Replicas for training can be kept in three ways:

- Parameters that are leaves, with hooks on the accumulation of their gradients. Then ``torch.autograd.grad`` finds no
  path to the source's parameters, the hooks run several times under reentrant checkpoints, and double backward has to
  be refused.
- Kept modules whose parameters are outputs of new nodes at each forward. All promises hold, but each forward makes
  thousands of tensors, which is most of what replicas cost.
- Kept outputs of one broadcast and its nodes (``autograd.bucket_nodes``), as in this file. Every recorded graph has
  these nodes, so all of autograd works as with new ones, and a forward costs one copy for each bucket and device.

Copies belong to the thread whose call has made them. A call of another thread makes new ones: it would write to
memory that the first thread may read just then, and nothing orders the two. A thread that runs only the backward is not
seen: it should not run beside another thread's forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from dataparallel.composable.after_slots import AfterSlots
from dataparallel.composable.bucket_order import BucketOrder
from dataparallel.composable.exchange_nodes import Passes
from dataparallel.composable.gradient_sums import GradientSums
from dataparallel.composable.persistent_copies import PersistentCopies
from dataparallel.modules.plan import ModulePlan, names_of
from dataparallel.streams.arrivals import Arrivals

if TYPE_CHECKING:
    from dataparallel.composable.machine_sums import Agreement

__all__ = ["PersistentTensors"]


class PersistentTensors:
    """The tensors of one module on all of its slots, for `KeptReplicas`. One thread at a time may use them.

    Args:
        slots: all slots; a call may use only the first few.
        first_bytes, cap_bytes: sizes of the first bucket and of the others.
        broadcast_buffers: if true, buffers get slot 0's values at each forward, else only when they are made.

    Attributes:
        sums: sums gradients, or keeps them on the slots.
        passes: the passes whose sums go on after the slots, if they do.
        copies: the copies that the next forward uses if it can; ``None`` before the first forward and after `clear`.
    """

    def __init__(self, slots: list[torch.device], first_bytes: int, cap_bytes: int, broadcast_buffers: bool) -> None:
        self.sums = GradientSums()
        self.passes: Passes | None = None
        self._agreement: Agreement | None = None
        self.copies: PersistentCopies | None = None
        self._slots = slots
        self._first_bytes, self._cap_bytes = first_bytes, cap_bytes
        self._broadcast_buffers = broadcast_buffers
        self._order = BucketOrder(None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("the tensors of persistent replicas belong to one module and cannot be copied")

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """The plan's tensors for each of the first slots, with current values; parameters are `ReplicaParameter`.

        Slot 0's tensors, and parameters of other slots on its device, share the source's memory. The tensors are the
        same if no graph is recorded. ``cap_bytes`` is ignored: the sizes of buckets were given before. ``arrivals``:
        parameters may still be on their way.
        """
        with torch.inference_mode(False):
            if record and self._agreement is not None:
                self._agree(self._agreement, plan)
            # Nothing here holds the former copies while new ones are made, which need their memory.
            if self.copies is None or not self._can_be_used_again(self.copies, plan, record):
                self.copies = self._make(plan, record, arrivals)
            else:
                self.sums.drop_void()
                self.copies.values.refresh(arrivals)
            return self.copies.by_slot[: len(slots)]

    def end_call(self) -> None:
        """Does nothing: the next call gives the tensors new values, and undoes changes that ``forward`` made."""

    forget_last_call = end_call

    def clear(self) -> None:
        """Releases all tensors, except gradients that wait on slots."""
        self.sums.use([])
        self.copies = None

    def take_further(self, after: AfterSlots) -> None:
        """From the next backward on, ``after`` follows the sums over the slots.

        Called between steps: a forward that still waits for its backward may not know of it.
        """
        if self.passes is not None:
            self.passes.after = after
            return
        self.clear()
        self.sums.go_on, self.passes = True, Passes(after)

    def agree_by(self, agreement: Agreement, after: AfterSlots) -> None:
        """From now on there are several machines: recorded forwards begin with ``agreement``. As `take_further`."""
        self.take_further(after)
        self._agreement = agreement

    def _can_be_used_again(self, copies: PersistentCopies, plan: ModulePlan, record: bool) -> bool:
        if record and self._order.known is None and not copies.learns_order:
            return False
        if self._agreement is None:
            # First: calls of several threads take turns in making copies, and would never learn the order.
            return (
                not self._order.learn(copies.order) and copies.still_fit(plan, self._slots) and copies.memory.restore()
            )
        # A forward without grad mode may run on one machine alone, so it decides nothing.
        is_agreed = copies.order is self._order.known or not record
        return is_agreed and copies.still_fit(plan, self._slots) and copies.memory.restore()

    def _agree(self, agreement: Agreement, plan: ModulePlan) -> None:
        """What a recorded forward does together with the other machines."""
        if self._broadcast_buffers:
            names = names_of(plan)
            buffers = [i for i in range(len(plan.tensors)) if i not in {*plan.parameters}]
            agreement.send_buffers({names[i]: plan.tensors[i] for i in buffers if not plan.tensors[i].requires_grad})
        if not self._order.is_of(plan):
            self._order = BucketOrder(plan)
        elif self._order.is_due and self._order.known is None:
            self._order.known = agreement.order(self._order.found())

    def _make(self, plan: ModulePlan, record: bool, arrivals: Arrivals | None) -> PersistentCopies:
        same_tree = self._order.is_of(plan)
        self.clear()
        order = self._order if same_tree else BucketOrder(plan)
        if record or self._agreement is None:
            self._order = order
        copies = PersistentCopies(plan, self._slots, self._broadcast_buffers)
        # Before the order is known each parameter is a bucket, for one pass, so that each has a time of arrival.
        copies.learns_order = record and order.known is None
        first, cap = (1, 1) if copies.learns_order else (self._first_bytes, self._cap_bytes)
        with torch.enable_grad():
            copies.make(first, cap, order, self.sums, self.passes, arrivals)
        return copies
