"""A unit's ties: to the user (`UnitSettings`), the user's modules (`ModuleRegistries`), its tree (`TreeBinding`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from dataparallel.sharded.placements import Shard, over_of
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.joint_gathers import GatherBudget
from dataparallel.sharded.units.shards import LastCopies, cut_of

if TYPE_CHECKING:
    from dataparallel.sharded.units.passes import BackwardPass
    from dataparallel.sharded.units.unit import Unit


RegistryEntry: TypeAlias = "tuple[dict[str, Any], str, int]"
"""Where a parameter is registered: the ``_parameters`` of a module, the name there, the position in the unit."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit. ``None`` means the dtype of the parameters, and for sums the dtype of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True


@dataclass(eq=False, repr=False)
class UnitSettings:
    """The settings of a unit, which a user may change at any time.

    Attributes:
        reshard_after_forward: free the parameters after forward (``True``), keep them (``False``), or shard them over
            groups of so many slots until backward (a number).
        is_reshard_automatic: the user has not set ``reshard_after_forward``.
        reshard_after_backward: free the parameters after backward.
        requires_gradient_sync: sum the gradients of all slots in backward; otherwise they stay on the slots.
        requires_all_reduce: sum gradients over the machines that have the same shards; otherwise partial sums wait.
        gradient_divide_factor: sums are divided by it.
        forward_prefetch, backward_prefetch: units whose gathers start when this one begins; ``None``: the next one.
        unshard_in_backward: gather this unit before its backward.
        is_last_backward: a pass of backward waits for its sums.
    """

    reshard_after_forward: bool | int = True
    is_reshard_automatic: bool = False
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float = 1.0
    forward_prefetch: list[Unit] | None = None
    backward_prefetch: list[Unit] | None = None
    unshard_in_backward: bool = True
    all_reduce_hook: Callable[[Tensor], None] | None = None
    post_optim_event: torch.Event | Sequence[torch.Event] | None = None
    is_last_backward: bool = True


def _no_tree(unit: Unit, slot: int, grads: Sequence[Tensor | None]) -> None:
    raise RuntimeError(f"the unit {unit.name!r} belongs to no tree")


@dataclass
class TreeBinding:
    """What a tree gives a unit that its calls use. A unit may belong to several trees, one after the other.

    Attributes:
        number: decides which slot collects the unit, and which joint gathers a slot has passed by.
        copies: notes the last copies of shards that slots have pulled from.
        join_pass: joins the pass of backward that runs, for a parameter that a loss uses directly. ``None``: no tree
            has called the unit.
    """

    number: int = 0
    deliver: Callable[[Unit, int, Sequence[Tensor | None]], None] = _no_tree
    settle: Callable[[], None] = lambda: None
    copies: LastCopies = field(default_factory=LastCopies)
    gather_budget: GatherBudget = field(default_factory=GatherBudget)
    join_pass: Callable[[], BackwardPass] | None = None


class ModuleRegistries:
    """Registers the parameters of one unit in the user's modules: the sharded ones, so that all code finds the same.

    Only inside of the user's ``unshard()`` the modules have the full ones.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.entries: list[RegistryEntry] = []

    def adopt(self) -> None:
        """Makes parameters the unit's own that other code has registered in the user's modules."""
        known: list[Sequence[Tensor]] = [self._unit.parameters]
        known += [slot_unit.parameters for slot_unit in self._unit.slot_units[:1]]
        adopted: dict[int, ShardedTensor] = {}
        for registry, name, position in self.entries:
            found = registry.get(name)
            if any(found is parameters[position] for parameters in known) or position in adopted:
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

    def show_current(self) -> None:
        """Registers the full parameters of slot 0 if the user has gathered them by ``unshard()``, else the sharded."""
        shown = [slot for slot in self._unit.slot_units[:1] if slot.is_full and slot.is_unsharded]
        self._register(shown[0].parameters if shown else self._unit.parameters)

    def show_sharded(self) -> None:
        """Registers the sharded parameters."""
        self._register(self._unit.parameters)

    def _register(self, parameters: Sequence[Tensor]) -> None:
        for registry, name, position in self.entries:
            registry[name] = parameters[position]


def _can_replace(value: object, own: ShardedTensor) -> TypeGuard[ShardedTensor]:
    """True if ``value`` may take the place of the unit's parameter ``own``."""
    if not isinstance(value, ShardedTensor) or value.devices != own.devices or value.shape != own.shape:
        return False
    placement, processes = value.placement, over_of(own.devices)
    if not isinstance(placement, Shard):
        return False
    # Along other dimensions than 0 all shards must have one size.
    owners = len(value.devices) * (1 if processes is None else processes.size)
    return placement.dim in (0, cut_of(own).dim) or value.shape[placement.dim] % owners == 0


def _described(value: object) -> str:
    if isinstance(value, ShardedTensor):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} on {value.device}"
    return repr(value)
