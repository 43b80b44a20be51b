"""A unit: the parameters that one application of ``fully_shard`` gathers and frees together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.devices import CPU
from dataparallel.profiling import note_copy
from dataparallel.sharded.operators import note_host_reads
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.bindings import ModuleRegistries, Precision, Settings, TreeBinding
from dataparallel.sharded.units.buffers import naming_out_of_memory
from dataparallel.sharded.units.gradients import UnitGradients
from dataparallel.sharded.units.joint_gathers import JointGathers
from dataparallel.sharded.units.nodes import Receiver, make_outputs
from dataparallel.sharded.units.pieces import Pieces
from dataparallel.sharded.units.shards import OwnedShards, PullSource, TreeStreams, cut_of, wait_for
from dataparallel.sharded.units.slot_unit import SlotUnit

if TYPE_CHECKING:
    from dataparallel.sharded.units.over_machines import MachinesOfTree, SourcesOverMachines


class Unit(Settings):
    """One unit.

    Args:
        name: for messages.
        parameters: sharded, over the slots.
        slots: the devices, which are owners too.
        precision: dtypes.
        is_offloaded: shards and gradients lie in host memory.
        pin: that memory is pinned.
        machines: over which the unit is spread, if there are several.

    Attributes:
        number_of_modules: that the unit was made from.
        registered: what the user's modules have of the unit.
        tree: what it has of the tree that uses it, which sets it.
        indices: for each dtype the positions of its parameters.
        owned: for each dtype what the owners hold.
        recorded: positions of the parameters that need gradients.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[ShardedTensor],
        slots: Sequence[torch.device],
        precision: Precision,
        *,
        is_offloaded: bool = False,
        pin: bool = False,
        machines: MachinesOfTree | None = None,
    ) -> None:
        super().__init__()
        self.name, self.slots, self.precision = name, list(slots), precision
        self.is_offloaded, self._pin, self.machines = is_offloaded, pin, machines
        self.parameters = list(parameters)
        self.number_of_modules = 1
        self.binding = TreeBinding()
        self.registries = ModuleRegistries(self)
        self.streams = TreeStreams(self.slots)
        self._lock = threading.Lock()
        self._make_owned()

    def _make_owned(self) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(i)
        self.indices = [*by_dtype.values()]
        self.owned = [
            OwnedShards([self.parameters[i] for i in indices], self.slots, self._pin, self.sharded_over)
            for indices in self.indices
        ]
        self._noted: list[int] | None = None
        self._had_no_values = any(owned.are_on_meta for owned in self.owned)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.cuts = [cut_of(parameter) for parameter in self.parameters]
        self._flags = self._present_flags()
        self.recorded = [i for i, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self.pieces = Pieces(self)
        self.joint = JointGathers(self)
        self.gradients = UnitGradients(self)
        self.slot_units: list[SlotUnit] = []
        self._receivers: list[Receiver] = []  # nodes refer to them weakly
        self._sources: list[PullSource] = []
        self._over_machines: SourcesOverMachines | None = None
        self._pulls = len(self.slots)

    def _present_flags(self) -> list[Any]:
        return [(id(p), p.dtype, p.requires_grad) for p in self.parameters]

    @property
    def full_bytes(self) -> int:
        """The size of the full parameters on one slot, with padding."""
        return sum(
            owned.layout.owners * owned.layout.numel * self.dtype_on_slots(owned.dtype).itemsize for owned in self.owned
        )

    @property
    def is_sharded_over_machines(self) -> bool:
        """True if shards of other machines are gathered too."""
        return self.machines is not None and self.machines.gathers is not None

    @property
    def sharded_over(self) -> tuple[int, int]:
        """Over how many machines the parameters are sharded, and which of them this is."""
        return (1, 0) if self.machines is None else (self.machines.parts, self.machines.part)

    def dtype_on_slots(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the slots compute in, for parameters of ``dtype``."""
        return self.precision.parameters or dtype if dtype.is_floating_point else dtype

    def dtype_of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of parameters of ``dtype`` travel."""
        return self.precision.sums or self.dtype_on_slots(dtype) if dtype.is_floating_point else dtype

    def to_host(self, part: Tensor) -> Tensor:
        """A copy in host memory, which is complete after an event on the current stream."""
        if part.device == CPU:
            return part
        pinned = self._pin and can_pin(part.device.type)
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
        note_copy("direct", part, CPU)
        return host.copy_(part, non_blocking=pinned)

    def refresh(self, before_packing: Callable[[], None] = lambda: None) -> None:
        """Before a call: sees what other code has done to the parameters since the last one.

        ``before_packing``: called before shards are copied. Over machines the first call after parameters have got
        memory gives those that are replicated the same values.

        Raises:
            RuntimeError: a parameter cannot be used, or has changed while gradients wait on the slots.
        """
        self.binding.settle()
        self.refuse_overwritten()
        self.registries.adopt()
        self.registries.show_sharded()
        if self._flags != self._present_flags():
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
            if self.is_offloaded and (away := owned.off_host()) is not None:
                raise RuntimeError(
                    f"a parameter of the unit {self.name!r} is on {away}, and CPUOffloadPolicy keeps shards in host "
                    "memory: load a state dict that is on the CPU, or call module.cpu() or to_empty(device='cpu')"
                )
            if owned.is_stale():
                before_packing()
                owned.pack()
        if self._had_no_values and self.machines is not None:
            self.machines.send_first_values(self.name, [flat for owned in self.owned for flat in owned.flats])
        self._had_no_values = False
        if not self.slot_units:
            slot_units, receivers = [], []
            for slot, device in enumerate(self.slots):
                with naming_out_of_memory("parameters", self.name, device, self.full_bytes):
                    slot_unit = SlotUnit(self, slot)
                if self.recorded:
                    recorded = [slot_unit.parameters[i] for i in self.recorded]
                    receivers.append(Receiver(self, slot_unit))
                    make_outputs(recorded, device, receivers[-1].receive)
                slot_units.append(slot_unit)
            self.slot_units, self._receivers = slot_units, receivers

    def _refuse_to_lose_gradients(self) -> None:
        """Raises if gradients wait on the slots, which are in the layout of the former parameters."""
        self.gradients.drop_void()
        if self.gradients.are_held:
            raise RuntimeError(
                f"parameters of the unit {self.name!r} were replaced, or their dtype or requires_grad was changed, "
                "while gradients wait on the slots for the next sum: undo that until a backward() outside of no_sync() "
                "has added them, or drop them with zero_grad()"
            )

    def refuse_overwritten(self, slot: int | None = None) -> None:
        """Raises if other code has written to full parameters, on one slot or on any.

        Raises:
            RuntimeError: it has. What was written is dropped.
        """
        slot_units = self.slot_units if slot is None else [self.slot_units[slot]]
        found = [at for slot_unit in slot_units if (at := slot_unit.take_overwritten()) is not None]
        if found:
            name = next(name for _, name, position in self.registries.entries if position == found[0])
            raise RuntimeError(
                f"{name!r} in the unit {self.name!r} was changed in place while it was full. The full parameter is a "
                "copy, so the change would be lost. Change the sharded one, which the module has after reshard()"
            )

    # ---- what slots pull from ----------------------------------------------------------------------------------------

    def sources(self) -> list[PullSource]:
        """What slots pull from now: for each dtype the same source for all slots of a round."""
        with self._lock:
            if not self._sources or self._sources[0].is_used_up:
                self._sources = [PullSource(self, owned, self._pulls) for owned in self.owned]
            return self._sources

    def sent_sources(self, slot: int, ready: Mapping[torch.device, Event]) -> Sequence[PullSource] | None:
        """If the unit is sharded over machines, what this slot pulls from next, on its way from now on."""
        if self.machines is None or self.machines.gathers is None:
            return None
        machines = self.machines.gathers
        from dataparallel.sharded.units.over_machines import SourceOverMachines, SourcesOverMachines

        with self._lock:
            if self._over_machines is None:
                pulls = self._pulls
                self._over_machines = SourcesOverMachines(
                    len(self.slots), lambda: [SourceOverMachines(self, owned, pulls, machines) for owned in self.owned]
                )
            return self._over_machines.next_sources(slot, ready)

    def _renew_sources(self, pulls: int) -> None:
        """Has values cast or sent again before ``pulls`` slots pull."""
        with self._lock:
            self._sources, self._over_machines, self._pulls = [], None, pulls
        self.joint.renew(pulls)

    # ---- a call or a pass of backward --------------------------------------------------------------------------------

    def begin_gathers(self, slots: int) -> None:
        """A call or a pass of backward begins on the first few slots. The parameters keep the values that they have."""
        self._noted = None
        self._noted = self.versions()
        self._renew_sources(slots)
        self._level(slots)

    def end_gathers(self) -> None:
        """It has ended: the parameters may change. Slots that have not pulled will not, so copies for them go."""
        self._noted = None
        self._renew_sources(len(self.slots))
        self.registries.show_current()

    def versions(self) -> list[int]:
        """A number for each parameter that grows with every change in place; in a call or a pass, as it began."""
        return [*map(_torch.version_of, self.parameters)] if self._noted is None else self._noted

    def has_group(self, slot: int, size: int) -> bool:
        """True if the slot may keep a piece: over machines only if its whole group takes part: all gather alike."""
        return self.sharded_over[0] == 1 or slot - slot % size + size <= self._pulls

    def _level(self, slots: int) -> None:
        """Over machines: these slots have full parameters if the first one has, so that all machines gather alike.

        Calls in which other machines used more or fewer slots may have left slots with full parameters.
        """
        if not self.is_sharded_over_machines:
            return
        first, *others = self.slot_units[:slots]
        for other in others:
            if first.is_full:
                other.copy_from(first)
            elif not first.is_started and isinstance(self.reshard_after_forward, bool):
                other.free()  # with a number, the first one may have a piece for a backward that the other waits for

    def free(self) -> None:
        """Frees what all slots have."""
        for slot_unit in self.slot_units:
            slot_unit.free()
        self.pieces.drop()
        self._renew_sources(len(self.slots))

    @property
    def _pullers(self) -> list[JointGathers | SlotUnit]:
        return [self.joint, *self.slot_units]

    def take_pulls(self) -> list[Event]:
        """Events after the last pulls of all slots, once."""
        found = []
        for puller in self._pullers:
            event, puller.last_pull = puller.last_pull, None
            if event is not None:
                found.append(event)
        return found

    # ---- what the user asks for --------------------------------------------------------------------------------------

    def unshard(self, async_op: bool) -> _Unsharded:
        """Starts a gather on all slots, and without ``async_op`` waits for it.

        The user's modules have the full parameters of the first slot once it has been waited for.
        """
        self.refresh()
        ready = self.streams.now()
        for slot_unit in self.slot_units:
            slot_unit.free_if_changed()
            slot_unit.start(ready)
        handle = _Unsharded(self, ready)
        if not async_op:
            handle.wait()
        elif self.is_offloaded:
            note_host_reads(self.binding.copies.last())
        return handle

    def reshard(self) -> None:
        """Frees the full parameters on all slots, except in a backward. The modules have the sharded ones again.

        Raises:
            RuntimeError: other code has written to full ones; they are freed all the same.
        """
        if _torch.is_in_backward():
            self.registries.show_sharded()
            return
        self.binding.settle()
        self.free()
        self.make_owners_wait()
        self.registries.show_current()
        self.refuse_overwritten()

    def make_owners_wait(self) -> None:
        """Orders later writes to the shards after all pulls, and after all copies: those of the host too."""
        pulls = [event for each in self._pullers if (event := each.last_pull) is not None]
        wait_for([*self.binding.copies.last(), *pulls], current_streams(self.slots).values())
        if self.is_offloaded:
            note_host_reads(self.binding.copies.last())


class _Unsharded:
    """A gather that the user has started."""

    def __init__(self, unit: Unit, ready: Mapping[torch.device, Event]) -> None:
        self._unit, self._ready = unit, ready

    def wait(self) -> None:
        """Makes the current streams wait for the gather. The user's modules have the full parameters from now on."""
        for slot_unit in self._unit.slot_units:
            slot_unit.make_full(self._ready)
        self._unit.make_owners_wait()
        self._unit.registries.show_current()
