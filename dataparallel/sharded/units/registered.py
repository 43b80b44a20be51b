"""What the user's modules have of a unit: its sharded parameters, full ones of the first slot, or pieces of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from dataparallel.sharded.placements import Shard, over_of
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.owned import cut_of

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


class Registered:
    """The registries of one unit's parameters in the user's modules.

    Attributes:
        places: registry, name, and position in the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.places: list[tuple[dict[str, Any], str, int]] = []
        self._pieces: list[nn.Parameter] | None = None  # if the modules have these

    def adopt(self) -> None:
        """Takes parameters that other code has registered in the user's modules in place of the unit's own."""
        shown: list[Sequence[Tensor]] = [self._unit.parameters]
        if self._unit.on_slots:
            shown.append(self._unit.on_slots[0].parameters)
        if self._pieces is not None:
            shown.append(self._pieces)
        adopted: dict[int, ShardedTensor] = {}
        for registry, name, position in self.places:
            found = registry.get(name)
            if any(found is known[position] for known in shown) or position in adopted:
                continue
            own = self._unit.parameters[position]
            if not isinstance(found, nn.Parameter) and isinstance(found, Tensor):
                raise RuntimeError(
                    f"{name!r} in the unit {self._unit.name!r} was replaced by {_described(found)} that is no "
                    "parameter, as torch.func.functional_call does for one call. A unit keeps the parameters that it "
                    "finds, and no gradient would reach what they were computed from. Use functional_call on a plain "
                    "module or on a replicated one, or load the values with load_state_dict"
                )
            if not _can_replace(found, own):
                raise RuntimeError(
                    f"{name!r} in the unit {self._unit.name!r} was replaced by {_described(found)}; fully_shard needs "
                    f"a sharded parameter of shape {tuple(own.shape)} on {[*map(str, own.devices)]}, placed by "
                    f"{own.placement!r} as this one is, or by another Shard(dim) that divides the dimension evenly. "
                    "Load values with load_state_dict(assign=False), or pass distribute_tensor(tensor, devices)"
                )
            adopted[position] = found
        for position, parameter in adopted.items():
            self._unit.parameters[position] = parameter

    def show_what_is_there(self) -> None:
        """Registers in the user's module what FSDP2 does.

        That is the full parameters while the first slot has them, or the pieces while its group has them, or else the
        sharded parameters.
        """
        is_full = bool(self._unit.on_slots) and self._unit.on_slots[0].is_full
        self._pieces = None if is_full else self._unit.pieces.as_parameters()
        self._register(self._unit.on_slots[0].parameters if is_full else self._pieces or self._unit.parameters)

    def pieces_dropped(self) -> None:
        """Pieces that the user's module shows would hold memory."""
        if self._pieces is not None:
            self._pieces = None
            self.show_sharded()

    def show_sharded(self) -> None:
        """Registers the sharded parameters in the user's module."""
        self._register(self._unit.parameters)

    def _register(self, parameters: Sequence[Tensor]) -> None:
        for registry, name, position in self.places:
            registry[name] = parameters[position]


def _can_replace(value: object, own: ShardedTensor) -> TypeGuard[ShardedTensor]:
    """True if other code may register ``value`` in the place of the parameter ``own``."""
    if not isinstance(value, ShardedTensor) or value.devices != own.devices or value.shape != own.shape:
        return False
    placement, own_over = value.placement, over_of(own.devices)
    if not isinstance(placement, Shard):
        return False
    # Along other dimensions than 0 parts have to be even.
    owners = len(value.devices) * (1 if own_over is None else own_over.size)
    return placement.dim in (0, cut_of(own).dim) or value.shape[placement.dim] % owners == 0


def _described(value: object) -> str:
    if isinstance(value, ShardedTensor):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} on {value.device}"
    return repr(value)
