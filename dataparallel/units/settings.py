"""What a unit is given: by its form, the dtypes that it uses; by each call of a tree, what it has of that tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.units.joint import Room
from dataparallel.units.owned import LastCopies

if TYPE_CHECKING:
    from dataparallel.units.unit import Unit

__all__ = ["InTree", "Precision"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit; ``None`` means those of the parameters, and for sums those of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True


def _no_tree(unit: Unit, slot: int, grads: Sequence[Tensor | None]) -> None:
    raise RuntimeError(f"the unit {unit.name!r} belongs to no tree")


@dataclass
class InTree:
    """What a unit has of the tree whose call uses it. It may be in several trees, one after the other.

    Attributes:
        number: of the unit in the tree: units are collected on distinct slots.
        deliver: takes a slot's gradients.
        settle: waits until no backward uses the unit.
        copies: the last copies of shards that slots have pulled from.
        room: how far joint gathers may run ahead.
    """

    number: int = 0
    deliver: Callable[[Unit, int, Sequence[Tensor | None]], None] = _no_tree
    settle: Callable[[], None] = lambda: None
    copies: LastCopies = field(default_factory=LastCopies)
    room: Room = field(default_factory=Room)
