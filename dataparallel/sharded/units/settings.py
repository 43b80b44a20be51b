"""What a user may set on a unit, and the dtypes that its form gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit; ``None`` means those of the parameters, and for sums those of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True


class Settings:
    """What a user may change on a unit at any time.

    Attributes:
        reshard_after_forward: free the parameters after forward (``True``), keep them (``False``), or keep a part of
            them on each slot, so that so many slots have the whole (a number).
        reshard_after_backward: free the parameters after backward.
        requires_all_reduce: add gradients over the machines that have the same parts; else they wait for that.
        requires_gradient_sync: add gradients of all slots in backward; else they stay on the slots.
        gradient_divide_factor: sums are divided by it.
        forward_prefetch, backward_prefetch: units whose gathers start when this one begins; ``None``: the next one.
        unshard_in_backward: gather before this unit's backward.
        is_last_backward: a pass of backward waits for its sums.
        is_reshard_automatic: the user has not set ``reshard_after_forward``.
    """

    def __init__(self) -> None:
        self.reshard_after_forward: bool | int = True
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.gradient_divide_factor = 1.0
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.unshard_in_backward = True
        self.all_reduce_hook: Callable[[Tensor], None] | None = None
        self.post_optim_event: torch.Event | Sequence[torch.Event] | None = None
        self.is_last_backward = True
        self.is_reshard_automatic = False
