"""`Unit` has the parameters that one application of ``fully_shard`` gathers and frees together.

Its ties are to the user (`UnitSettings`), to the user's modules (`ModuleRegistries`), and to its `Tree`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.comm import settings
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.devices import CPU
from dataparallel.sharded.operators import note_host_reads
from dataparallel.sharded.placements import Shard, over_of
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import naming_out_of_memory
from dataparallel.sharded.units.calls import reach_parameters
from dataparallel.sharded.units.gradients import UnitGradients
from dataparallel.sharded.units.nodes import Receiver, make_outputs
from dataparallel.sharded.units.peer_tables import PeerTables
from dataparallel.sharded.units.shards import (
    LastCopies,
    OwnedShards,
    PullSource,
    TreeStreams,
    UnitPieces,
    cut_of,
    wait_for,
)
from dataparallel.sharded.units.slot_unit import SlotUnit
from dataparallel.weak_members import WeakMembers

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Lane
    from dataparallel.sharded.units.over_machines import MachinesOfTree, SourceOverMachines
    from dataparallel.sharded.units.tree import Tree


RegistryEntry: TypeAlias = "tuple[dict[str, Any], str, int]"
"""Where a parameter is registered: the ``_parameters`` of a module, the name there, the position in the unit."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit. ``None`` means the dtype of the parameters, and for sums the dtype of the gradients."""

    parameters: torch.dtype | None = None
    sums: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_inputs: bool = True

    def of_inputs(self, arguments: Any) -> Any:
        """Returns the arguments of a call, cast if they are to be."""
        return _cast(arguments, self.parameters) if self.casts_inputs else arguments

    def of_outputs(self, output: Any) -> Any:
        """Returns the output of a call, cast if it is to be."""
        return _cast(output, self.outputs)


def _cast(structure: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return structure
    return _torch.pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, structure)


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


class Unit(UnitSettings):
    """The parameters of one unit at their owners, and a `SlotUnit` for each slot (``slot_units``).

    Attributes:
        tree: the tree of the last call. A unit may belong to several trees, one after the other.
        delivers_to: the tree that takes the gradients.
        copies: notes the last copies of shards that slots have pulled from; those of its tree.
        indices: for each dtype the positions of its parameters; ``owned`` has their flat shards.
        trainable: positions of the parameters that need gradients.
        comm_settings: those of the last call. Its backward may run in threads without the caller's settings.
        tables: the tables of the unit if kernels serve it in this call.
        graphs: captured graphs of all trees of the unit, which read full parameters where they are.
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
        self.graphs: WeakMembers[Any] = WeakMembers()
        self.parameters = list(parameters)
        self.number_of_modules = 1
        self.tree: Tree | None = None
        self.delivers_to: Tree | None = None
        self.copies = LastCopies()
        self.registries = ModuleRegistries(self)
        self.streams = TreeStreams(self.slots)
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held while slots get their units: the first calls may come at once
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
        self._noted_versions: list[int] | None = None  # as a call or pass began
        self._had_no_values = any(owned.are_on_meta for owned in self.owned)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.cuts = [cut_of(parameter) for parameter in self.parameters]
        self._parameter_flags = self._present_flags()
        self.trainable = [i for i, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self.pieces = UnitPieces(self)
        self.gradients = UnitGradients(self)
        self.comm_settings = settings.current()
        self.tables: PeerTables | None = None
        self._made_tables: PeerTables | None = None
        self.slot_units: list[SlotUnit] = []
        self._receivers: list[Receiver] = []  # kept here, because nodes refer to them weakly
        self._sources: list[PullSource] = []
        # All machines have to gather the same units in one order, whichever of their slots comes first. So the first
        # gathers of all slots use the same sources, their second ones the next, and so on.
        self._sent: list[list[SourceOverMachines]] = []
        self._number_sent = [0] * len(self.slots)  # for each slot
        self._gathers: Lane | None = None  # of the last tree that has called the unit
        self._epoch: int | None = None  # of the machines, in which the call or pass has begun
        self._pulls = len(self.slots)  # how many slots pull in a round

    def _present_flags(self) -> list[Any]:
        return [(id(p), p.dtype, p.requires_grad) for p in self.parameters]

    @property
    def full_bytes(self) -> int:
        """The bytes of the full parameters on one slot, with padding."""
        return sum(
            owned.layout.owners * owned.layout.numel * self.dtype_on_slots(owned.dtype).itemsize for owned in self.owned
        )

    @property
    def keeps_memory(self) -> bool:
        """True if full parameters keep their memory when they are freed, in calls of any tree."""
        return len(self.graphs) > 0

    @property
    def is_sharded_over_machines(self) -> bool:
        return self.machines is not None and self.machines.gathers is not None

    @property
    def sharded_over(self) -> tuple[int, int]:
        """How many machines the parameters are sharded over, and the number of this machine among them."""
        return (1, 0) if self.machines is None else (self.machines.shard_size, self.machines.shard_rank)

    def dtype_on_slots(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the full parameters for sharded parameters of ``dtype``."""
        return self.precision.parameters or dtype if dtype.is_floating_point else dtype

    def dtype_of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which slots deliver gradients of parameters of ``dtype``."""
        return self.precision.sums or self.dtype_on_slots(dtype) if dtype.is_floating_point else dtype

    def to_host(self, part: Tensor) -> Tensor:
        """Returns a copy in host memory, which the current stream completes."""
        if part.device == CPU:
            return part
        pinned = self._pin and can_pin(part.device.type)
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
        return host.copy_(part, non_blocking=pinned)

    def refresh(self, before_packing: Callable[[], None] = lambda: None) -> None:
        """Adapts the unit to what other code has done to the parameters since the last call, or raises if it cannot.

        ``before_packing`` is called before shards are copied. Once parameters have got memory, the first call over
        machines gives the machines that replicate them the same values.
        """
        self._settle()
        self.refuse_overwritten()
        self.registries.adopt()
        self.registries.show_sharded()
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
            self._made_tables = PeerTables(self)
        self.tables = self._made_tables if is_served else None
        with self._making:
            if self.slot_units:
                return
            reach_parameters()
            slot_units, receivers = [], []
            for slot, device in enumerate(self.slots):
                with naming_out_of_memory("parameters", self.name, device, self.full_bytes):
                    slot_unit = SlotUnit(self, slot)
                if self.trainable:
                    trainable = [slot_unit.parameters[i] for i in self.trainable]
                    receivers.append(Receiver(self, slot_unit))
                    make_outputs(trainable, device, receivers[-1].receive)
                slot_units.append(slot_unit)
            self.slot_units, self._receivers = slot_units, receivers

    def _refuse_to_lose_gradients(self) -> None:
        """Raises if gradients wait on the slots: they have the layout of the former parameters."""
        self.gradients.drop_void()
        if self.gradients.are_held:
            raise RuntimeError(
                f"parameters of the unit {self.name!r} were replaced, or their dtype or requires_grad was changed, "
                "while gradients wait on the slots for the next sum: undo that until a backward() outside of no_sync() "
                "has added them, or drop them with zero_grad()"
            )

    def refuse_changed(self, versions: list[int]) -> None:
        """Raises if a parameter has changed since a forward, in which `versions` returned these."""
        if self.versions() != versions:
            raise RuntimeError(
                f"a parameter of the unit {self.name!r} was changed in place between forward and backward, "
                "which needs its former values. Step the optimizer after backward"
            )

    def refuse_overwritten(self, slot: int | None = None) -> None:
        """Raises if other code wrote to full parameters on this slot, or without ``slot`` on any. The write is lost."""
        slot_units = self.slot_units if slot is None else [self.slot_units[slot]]
        overwritten = [at for slot_unit in slot_units if (at := slot_unit.take_overwritten()) is not None]
        if overwritten:
            name = next(name for _, name, position in self.registries.entries if position == overwritten[0])
            raise RuntimeError(
                f"{name!r} in the unit {self.name!r} was changed in place while it was full. The full parameter is a "
                "copy, so the change would be lost. Change the sharded one, which the module has after reshard(). If "
                "forward changes it, use replicate. An Embedding with max_norm does: leave max_norm out, and after "
                "each step call shard.renorm_(norm_type, 0, max_norm) for each shard of weight.shards, in no_grad()"
            )

    def _settle(self) -> None:
        if self.tree is not None:
            self.tree.settle()

    # ---- sources of pulls --------------------------------------------------------------------------------------------

    def sources(self) -> list[PullSource]:
        """Returns for each dtype the source of this round, from which each slot pulls once."""
        with self._lock:
            if not self._sources or self._sources[0].is_used_up:
                self._sources = [PullSource(self, owned, self._pulls) for owned in self.owned]
            return self._sources

    def sent_sources(self, slot: int, ready: Mapping[torch.device, Event]) -> Sequence[PullSource] | None:
        """Returns the sources of the slot's next gather, which machines have begun to send; ``None`` without them."""
        if self.machines is None or self.machines.gathers is None:
            return None
        lane = self._gathers or self.machines.gathers
        epoch = lane.machines.epoch if self._epoch is None else self._epoch  # outside of a call there is none
        from dataparallel.sharded.units.over_machines import SourceOverMachines

        with self._lock:
            number = self._number_sent[slot]
            self._number_sent[slot] += 1
            if number == len(self._sent):
                self._sent.append([SourceOverMachines(self, owned, self._pulls, lane, epoch) for owned in self.owned])
                for source in self._sent[number]:
                    source.send(ready)
            return self._sent[number]

    def _renew_sources(self, pulls: int) -> None:
        """Drops all sources, so that shards are cast or sent again for the next ``pulls`` slots."""
        with self._lock:
            old = [*self._sources, *chain.from_iterable(self._sent)]
            self._sources, self._sent, self._number_sent, self._pulls = [], [], [0] * len(self.slots), pulls
        for source in old:
            source.drop()

    # ---- a call or a pass of backward --------------------------------------------------------------------------------

    def begin_gathers(self, slots: int, lane: Lane | None = None) -> None:
        """Begins a call or a pass of backward on the first ``slots`` slots. Until it ends, no parameter may change.

        ``lane``: that of the tree, if parameters are sharded over machines. All gathers of a tree have one order.
        """
        self._noted_versions = None
        self._noted_versions = self.versions()
        self._epoch = None if lane is None else lane.machines.epoch
        self._gathers = lane or self._gathers
        self._renew_sources(slots)
        self._make_slots_alike()

    def end_gathers(self) -> None:
        """Ends a call or a pass: the parameters may change. Copies for slots that have not pulled are dropped."""
        self._noted_versions = self._epoch = None
        self._renew_sources(len(self.slots))

    def versions(self) -> list[int]:
        """Returns numbers that change with the values of the parameters. A call or pass keeps its first ones.

        Writes that torch does not see, such as those of ``shard.data``, change none.
        """
        noted = self._noted_versions  # read once: a call of another thread may end now
        if noted is not None:
            return noted
        versions = [*map(_torch.version_of, self.parameters)]  # not moved by writes through `data` or `shards`
        for owned in self.owned:
            versions += owned.versions()
        return versions

    def has_group(self, slot: int, size: int) -> bool:
        """True if the slot may keep a piece. Over machines its whole group has to take part, as all gather alike."""
        return self.sharded_over[0] == 1 or slot - slot % size + size <= self._pulls

    def _make_slots_alike(self) -> None:
        """Over machines, makes all slots full if slot 0 is, so that all machines gather alike.

        Slots may differ after calls in which other machines used more or fewer slots. In a pass of backward more slots
        may take part than at its beginning, with another call.
        """
        if not self.is_sharded_over_machines:
            return
        first, *others = self.slot_units
        for other in others:
            if first.is_full:
                other.copy_from(first)
            elif not first.is_started and isinstance(self.reshard_after_forward, bool):
                other.free()  # with a number, slot 0 may have a piece instead, for a backward that the other waits for

    def drop_old_values(self) -> None:
        """Frees full parameters and pieces before a call, where their values may be old: see `SlotUnit`."""
        for slot_unit in self.slot_units:
            slot_unit.drop_old_values()
        # Over machines they stay for a backward that is still to come, because all machines have to gather alike.
        if not (_torch.is_in_backward() or self.is_sharded_over_machines):
            self.pieces.drop()

    def free(self) -> None:
        """Frees the full parameters and the pieces of all slots."""
        for slot_unit in self.slot_units:
            slot_unit.free()
        self.pieces.drop()
        self._renew_sources(len(self.slots))

    # ---- calls by the user -------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool) -> _UnshardHandle:
        """Starts a gather on all slots, and without ``async_op`` waits for it."""
        self.refresh()
        ready = self.streams.now()
        for slot_unit in self.slot_units:
            slot_unit.unshard(ready)
        handle = _UnshardHandle(self, ready)
        if not async_op:
            handle.wait()
        elif self.is_offloaded:
            note_host_reads(self.copies.last())
        return handle

    def reshard(self) -> None:
        """Frees the full parameters on all slots, except in a backward. Raises if other code has written to them."""
        if _torch.is_in_backward():
            self.registries.show_sharded()
            return
        self._settle()
        self.free()
        self.make_owners_wait()
        self.registries.show_current()
        self.refuse_overwritten()

    def make_owners_wait(self) -> None:
        """Orders later writes to the shards, by streams and by the host, after all pulls and copies of shards."""
        copies = self.copies.last()
        wait_for([*copies, *self.streams.after_pulls()], current_streams(self.slots).values())
        if self.is_offloaded:
            note_host_reads(copies)


class _UnshardHandle:
    """The handle of a gather that the user has started."""

    def __init__(self, unit: Unit, ready: Mapping[torch.device, Event]) -> None:
        self._unit, self._ready = unit, ready

    def wait(self) -> None:
        """Makes the current streams wait for the gather. The user's modules have the full parameters from now on."""
        for slot_unit in self._unit.slot_units:
            slot_unit.make_full(self._ready)
        self._unit.make_owners_wait()
        self._unit.registries.show_current()
