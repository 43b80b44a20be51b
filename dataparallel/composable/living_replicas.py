"""Replicas that stay: kept module objects around living tensors.

What ``kept_replicas`` keeps for calls without a graph, module objects that see every change of the source's tree and
drop what ``forward`` has left on them, this room has for all calls, around tensors that are part of every graph
(``living_tensors``). ``replicate_state`` owns one for each module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataparallel.composable.gradient_sums import GradientSums
from dataparallel.composable.living_tensors import LivingTensors
from dataparallel.kept_replicas import KeptReplicas
from dataparallel.module_plan import ModulePlan

__all__ = ["LivingReplicas"]


class LivingReplicas(KeptReplicas):
    """The replicas of one module on ``slots``, of which a call may use the first few.

    Attributes:
        sums: how gradients are summed.
    """

    def __init__(self, slots: list[torch.device], first_bytes: int, cap_bytes: int, broadcast_buffers: bool) -> None:
        self.sums = GradientSums()
        self.slots = slots
        self._living = LivingTensors(first_bytes, cap_bytes, broadcast_buffers, self.sums)
        super().__init__()

    def __reduce__(self) -> tuple[type[KeptReplicas], tuple[()]]:
        raise TypeError("living replicas belong to one module and cannot be copied")

    def _clear(self) -> None:
        super()._clear()
        self._living.clear()

    def _tensors(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, record: bool) -> list[list[Tensor]]:
        return self._living.refreshed(plan, self.slots)[: len(slots)]
