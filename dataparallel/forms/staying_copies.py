"""`StayingCopies`: the tensors of a `DataParallel` whose replicas launch graphs. They stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.forms.persistent_tensors import PersistentTensors
from dataparallel.replicas.plan import ModulePlan


class StayingCopies(PersistentTensors):
    """The tensors of one wrapper. A copy of it, and an unpickled one, is empty."""

    def __reduce__(self) -> Any:
        return type(self), (self._slots, self._first_bytes, self._cap_bytes, self._broadcast_buffers)

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """See `TensorStore.for_call`. The user may have assigned other devices."""
        if self._slots[: len(slots)] != slots:
            self.clear()
            self._slots = list(slots)
        return super().for_call(plan, slots, cap_bytes, record, arrivals)
