"""`Unit` gathers and frees the parameters that one application of ``fully_shard`` gathers and frees together.

It follows what other code does to the parameters between calls, and registers them in the user's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.sharded.order import note_host_reads
from dataparallel.sharded.placements import Shard, over_of
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import PeerTables, naming_out_of_memory
from dataparallel.sharded.units.gather import SlotUnit, UnitSources
from dataparallel.sharded.units.gradients import UnitGradients
from dataparallel.sharded.units.nodes import Receiver, make_outputs, reach_parameters
from dataparallel.sharded.units.sharded_unit import ShardedUnit, cut_of

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Lane


class Unit(ShardedUnit):
    """A unit with a `SlotUnit` for each slot (``slot_units``), and the gradients that these deliver.

    Attributes:
        forward_prefetch, backward_prefetch: units whose gathers start when this one begins; ``None``: the next one.
    """

    forward_prefetch: list[Unit] | None = None
    backward_prefetch: list[Unit] | None = None

    def _make_owned(self) -> None:
        super()._make_owned()
        self.sources, self.gradients = UnitSources(self), UnitGradients(self)
        self.slot_units: list[SlotUnit] = []
        self._given: dict[int, dict[str, Any]] = {}  # by position: the Python attributes that the full ones have
        self._receivers: list[Receiver] = []  # kept here, because nodes refer to them weakly

    # ---- the user's modules ------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Makes parameters the unit's own that other code has registered in the user's modules."""
        adopted: dict[int, ShardedTensor] = {}
        for registry, name, position in self.registries.entries:
            found = registry.get(name)
            if self._is_own(found, position) or position in adopted:
                continue
            own = self.parameters[position]
            if not isinstance(found, nn.Parameter) and isinstance(found, Tensor):
                raise RuntimeError(
                    f"{name!r} in the unit {self.name!r} was replaced by {_described(found)} that is no "
                    "parameter, as torch.func.functional_call does for one call. A unit keeps the parameters that it "
                    "finds, and no gradient would reach what they were computed from. Use functional_call on a plain "
                    "module or on a replicated one, or load the values with load_state_dict"
                )
            if not _can_replace(found, own):
                raise RuntimeError(
                    f"{name!r} in the unit {self.name!r} was replaced by {_described(found)}; fully_shard needs "
                    f"a sharded parameter of shape {tuple(own.shape)} on {[*map(str, own.devices)]}, placed by "
                    f"{own.placement!r} as this one is, or by another Shard(dim) that divides the dimension evenly. "
                    "Load values with load_state_dict(assign=False), or pass distribute_tensor(tensor, devices)"
                )
            adopted[position] = found
        for position, parameter in adopted.items():
            self.parameters[position] = parameter

    def show_current(self) -> None:
        """Registers the full parameters of slot 0 if the user has gathered them by ``unshard()``, else the sharded."""
        shown = [slot for slot in self.slot_units[:1] if slot.is_full and slot.is_unsharded]
        self._show(shown[0].parameters if shown else self.parameters)

    def show_sharded(self) -> None:
        """Registers the sharded parameters, so that all code finds the same. Only in ``unshard()`` there are others."""
        self._show(self.parameters)

    def _show(self, parameters: Sequence[Tensor]) -> None:
        """Registers ``parameters`` where the unit's own are. What other code has put there stays for `refresh`."""
        for registry, name, position in self.registries.entries:
            if self._is_own(registry.get(name), position):
                registry[name] = parameters[position]

    def _is_own(self, found: object, position: int) -> bool:
        """True for the sharded parameter of this position, and for the full one that ``unshard()`` shows."""
        return found is self.parameters[position] or any(
            found is slot.parameters[position] for slot in self.slot_units[:1]
        )

    # ---- before a call -----------------------------------------------------------------------------------------------

    def refresh(self, before_packing: Callable[[], None] = lambda: None) -> None:
        """Adapts the unit to what other code has done to the parameters since the last call, or raises if it cannot.

        ``before_packing`` is called before shards are copied. Once parameters have got memory, the first call over
        machines gives the machines that replicate them the same values.
        """
        self.settle()
        self.refuse_overwritten()
        self._adopt()
        self.registries.register(self.parameters)
        if self._parameter_flags != self._present_flags():
            self._refuse_to_lose_gradients()
            self.free()
            before_packing()
            self._make_owned()
        for owned in self.owned:
            if owned.are_on_meta:
                raise RuntimeError(
                    f"the parameters of the unit {self.name!r} are on the meta device: give them memory with "
                    "to_empty(device=...) and initialise or load them before the first call"
                )
            if self.is_offloaded and (device := owned.off_host()) is not None:
                raise RuntimeError(
                    f"a parameter of the unit {self.name!r} is on {device}, and CPUOffloadPolicy keeps shards in host "
                    "memory: load a state dict that is on the CPU, or call module.cpu() or to_empty(device='cpu')"
                )
            if owned.is_stale():
                before_packing()
                owned.pack()
                self.gradients.receive_direct()
        if self._had_no_values and self.machines is not None:
            self.machines.send_first_values(self.name, [flat for owned in self.owned for flat in owned.flats])
        self._had_no_values = False
        self.comm_settings = settings.current()
        # Over machines what a kernel would read or write has to be packed for the network.
        is_served = self.machines is None and why_no_tables(self.slots) is None
        if is_served and self._made_tables is None:
            gathered = [(owned.layout, owned.dtype) for owned in self.owned]
            self._made_tables = PeerTables(self.slots, self.precision, gathered, self.groups)
        self.tables = self._made_tables if is_served else None
        self._make_slot_units()
        self._give_attributes()

    def _make_slot_units(self) -> None:
        with self._making:
            if self.slot_units:
                return
            reach_parameters()
            slot_units, receivers = [], []
            for slot, device in enumerate(self.slots):
                with naming_out_of_memory("parameters", self.name, device, self.full_bytes):
                    slot_unit = SlotUnit(self, self.sources, slot)
                slot_units.append(slot_unit)
                if self.trainable:
                    trainable = [slot_unit.parameters[i] for i in self.trainable]
                    receivers.append(Receiver(self, slot_unit, slot_units[0].parameters))
                    make_outputs(trainable, device, receivers[-1].receive)
            self.slot_units, self._receivers = slot_units, receivers

    def _give_attributes(self) -> None:
        """Gives full parameters the Python attributes that users have set on the sharded ones."""
        for position, parameter in enumerate(self.parameters):
            given, before = parameter.user_attributes(), self._given.get(position, {})
            if given.keys() == before.keys() and all(map(is_, given.values(), before.values())):
                continue
            self._given[position] = given
            for slot_unit in self.slot_units:
                own = vars(slot_unit.parameters[position])
                for name in own.keys() - given.keys():
                    del own[name]
                own.update(given)

    def _refuse_to_lose_gradients(self) -> None:
        """Raises if gradients wait on the slots: they have the layout of the former parameters."""
        self.gradients.drop_void()
        if self.gradients.are_held:
            raise RuntimeError(
                f"parameters of the unit {self.name!r} were replaced, or their dtype or requires_grad was changed, "
                "while gradients wait on the slots for the next sum: undo that until a backward() outside of no_sync() "
                "has added them, or drop them with zero_grad()"
            )

    def refuse_overwritten(self) -> None:
        """Raises if other code wrote to full parameters on any slot. The write is lost."""
        overwritten = [at for slot_unit in self.slot_units if (at := slot_unit.take_overwritten()) is not None]
        if overwritten:
            self.refuse_write(overwritten[0])

    # ---- a call or a pass of backward --------------------------------------------------------------------------------

    def begin_gathers(self, slots: int, lane: Lane | None = None) -> None:
        """Begins a call or a pass of backward on the first ``slots`` slots. Until it ends, no parameter may change.

        Over machines this makes all slots full if slot 0 is, so that all machines gather alike. Slots may differ after
        calls in which other machines used more or fewer slots. In a pass of backward more slots may take part than at
        its beginning, with another call.
        """
        self.note_versions()
        self.sources.begin(slots, lane)
        if not self.is_sharded_over_machines:
            return
        first, *others = self.slot_units
        for other in others:
            if first.is_full:
                other.copy_from(first)
            elif not first.is_started and isinstance(self.reshard_after_forward, bool):
                other.free()  # with a number, slot 0 may have a piece instead, for a backward that the other waits for

    def end_gathers(self) -> None:
        """Ends a call or a pass: the parameters may change."""
        self.forget_versions()
        self.sources.end()

    def drop_old_values(self) -> None:
        """Frees full parameters and pieces before a call, where their values may be old: see `SlotUnit`."""
        for slot_unit in self.slot_units:
            slot_unit.drop_old_values()
        # Over machines they stay for a backward that is still to come, because all machines have to gather alike.
        if not (_torch.is_in_backward() or self.is_sharded_over_machines):
            self.sources.drop_pieces()

    def free(self) -> None:
        """Frees the full parameters and the pieces of all slots."""
        for slot_unit in self.slot_units:
            slot_unit.free()
        self.sources.drop_pieces()
        self.sources.renew()

    # ---- calls by the user -------------------------------------------------------------------------------------------

    def start_unshard(self) -> Mapping[torch.device, Event]:
        """Starts a gather on all slots, and returns the events that it waits for. `end_unshard` follows."""
        self.refresh()
        ready = self.streams.now()
        for slot_unit in self.slot_units:
            slot_unit.unshard(ready)
        if self.is_offloaded:
            note_host_reads([*self.streams.last_casts.values()])
        return ready

    def end_unshard(self, ready: Mapping[torch.device, Event]) -> None:
        """Makes the current streams wait for the gather. The user's modules have the full parameters from now on."""
        for slot_unit in self.slot_units:
            slot_unit.make_full(ready)
        self.streams.make_owners_wait(current_streams(self.slots), self.is_offloaded)
        self.show_current()

    def reshard(self) -> None:
        """Frees the full parameters on all slots, except in a backward. Raises if other code has written to them."""
        if _torch.is_in_backward():
            self.show_sharded()
            return
        self.settle()
        self.free()
        self.streams.make_owners_wait(current_streams(self.slots), self.is_offloaded)
        self.show_current()
        self.refuse_overwritten()


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
