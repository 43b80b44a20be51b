"""`Tree` runs calls of the root (`RootCall`) and passes of backward over its units, and orders them against each other.

The root is the outermost module that is called. Its tree has the units of the root and of all modules below.
`Unit` gathers and frees its parameters on all slots, and follows what other code does to them between calls.
One pass of backward may include several tasks of the engine: those that reentrant checkpoints start inside it, and
those of other threads at the same time. Their gradients are summed together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, pairwise
from operator import is_
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass, wait_for_passes
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, GivenEvents, current_streams
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.profiling import stage
from dataparallel.sharded.order import note_host_reads
from dataparallel.sharded.placements import Shard, over_of
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.backward import (
    BackwardPass,
    PassGradients,
    SumsOverMachines,
    UnitGradients,
    reach_parameters,
)
from dataparallel.sharded.units.gather import SlotUnit, UnitSources
from dataparallel.sharded.units.unit import (
    PeerTables,
    ShardedUnit,
    cut_of,
    naming_out_of_memory,
    wait_for,
)

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
        with self._making:
            self._adapt(before_packing)

    def _adapt(self, before_packing: Callable[[], None]) -> None:
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
            self._made_tables = PeerTables(self)
        self.tables = self._made_tables if is_served else None
        self._make_slot_units()
        self._give_attributes()

    def _make_slot_units(self) -> None:
        if self.slot_units:
            return
        reach_parameters()
        slot_units = []
        for slot, device in enumerate(self.slots):
            with naming_out_of_memory("parameters", self.name, device, self.full_bytes):
                slot_units.append(SlotUnit(self, self.sources, slot))
        for slot_unit in slot_units:
            self.gradients.attach(slot_unit)
        self.slot_units = slot_units

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
        self.noted_versions = None
        self.noted_versions = self.versions()
        self.sources.begin(slots, lane)
        if self.gathers is None:
            return
        first, *others = self.slot_units
        for other in others:
            if first.is_full:
                other.copy_from(first)
            elif not first.is_started and isinstance(self.reshard_after_forward, bool):
                other.free()  # with a number, slot 0 may have a piece instead, for a backward that the other waits for

    def end_gathers(self) -> None:
        """Ends a call or a pass: the parameters may change."""
        self.noted_versions = None
        self.sources.renew()

    def drop_old_values(self) -> None:
        """Frees full parameters and pieces before a call, where their values may be old: see `SlotUnit`."""
        for slot_unit in self.slot_units:
            slot_unit.drop_old_values()
        # Over machines they stay for a backward that is still to come, because all machines have to gather alike.
        if not (_torch.is_in_backward() or self.gathers is not None):
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
        ready = {device: Event(stream) for device, stream in current_streams(self.slots).items()}
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


class Tree:
    """The units of one tree, the root's first.

    Attributes:
        streams: the root's, on which the calls of this tree note casts of all units.
        next_unit: for each unit the unit that came after it in the last forward.
        order_of_sums: the numbers of units in rank 0's order of sums over machines; empty until it is known.
    """

    def __init__(self, units: Sequence[Unit], slots: Sequence[torch.device]) -> None:
        self.units, self.slots, self.streams = list(units), list(slots), units[0].streams
        self.next_unit: dict[Unit, Unit] = {}
        self.last_call: RootCall | None = None
        self._pass: BackwardPass | None = None
        self._failed: list[BackwardPass] = []  # passes that have failed while tasks of the engine run on in them
        self._ending_thread: int | None = None  # ends a pass now
        self._changed = threading.Condition()
        self._registering = threading.Lock()  # guards what a tree registers, and how many calls run
        self._number_of_calls = 0
        self.machines, self.gathers = self.units[0].machines, self.units[0].gathers
        self.order_of_sums: list[int] = []

    @contextmanager
    def calling(self, number_of_slots: int) -> Iterator[RootCall]:
        """Wraps a call of the root on the first ``number_of_slots`` slots. Call `prepare` before."""
        with self._registering:
            # The sharded parameters stay in the user's modules until the last running call has ended.
            self._number_of_calls += 1
            for unit in self.units:
                unit.show_sharded()
        call: RootCall | None = None
        has_failed = True
        try:
            call = RootCall(self, self.slots[:number_of_slots])
            yield call
            has_failed = False
        finally:
            with self._registering:
                self._number_of_calls -= 1
            if call is not None:
                call.end_forward(has_failed)
                self.make_owners_wait(call.computing)

    def show_current(self) -> None:
        """Registers full parameters again that the user's ``unshard()`` keeps, unless a call of any thread runs.

        A call that begins reads the user's modules. Full parameters of another call would be freed under its hands.
        """
        with self._registering:
            if self._number_of_calls == 0:
                for unit in self.units:
                    unit.show_current()

    def prepare(self) -> None:
        """Adapts the units to what other code has done to the parameters since the last call."""
        for unit in self.units:
            unit.refresh(self._wait_for_optimizer)
            unit.gradients.drop_void()
            unit.drop_old_values()

    def settle(self) -> None:
        """Waits until no pass of backward uses the units. Called inside a backward, it does nothing.

        A backward that fails raises at once, while other threads of the engine still run its nodes, which read
        parameters. Its pass ends when these threads have left.
        """
        if _torch.is_in_backward() or self._ending_thread == threading.get_ident():
            return
        with self._changed:
            wait_for_passes(self._changed, lambda: self._pass is None and self._ending_thread is None)

    def _wait_for_optimizer(self) -> None:
        """Makes the current streams, on which shards are packed next, wait for the optimizer's step."""
        event = self.take_post_optim_event()
        if event is not None:
            wait_for([event], current_streams(self.slots).values())

    def take_post_optim_event(self) -> GivenEvents | None:
        """Returns, once, the events after the optimizer's step that the user has given for the next call."""
        root = self.units[0]
        given, root.post_optim_event = root.post_optim_event, None
        if given is None:
            return None
        return GivenEvents([given] if isinstance(given, torch.Event) else given)

    def join_pass(
        self, call: RootCall | None = None, only_if_alone: bool = False, reaches_units: bool = True
    ) -> BackwardPass:
        """Returns the running pass of backward, begun now if there is none. It lasts until the task has ended.

        ``call``: the one whose graph is reached; by default the last one.
        """
        call = call or self.last_call
        assert call is not None
        with self._changed:
            if any(running_pass() in failed.tasks for failed in self._failed):
                raise RuntimeError(
                    "this backward has lost gradients: it ran together with another one through the same modules, "
                    "which has failed. Zero the gradients, and run it again"
                )
            is_new = False
            # While another thread ends a pass it frees all units, also those that a new pass would gather.
            wait_for_passes(self._changed, lambda: self._ending_thread in (None, threading.get_ident()))
            while self._pass is None or not self._pass.join(only_if_alone):
                if self._pass is None:
                    self._pass, is_new = self._new_pass(call), True
                else:
                    ending = self._pass
                    wait_for_passes(self._changed, lambda: self._pass is not ending and self._ending_thread is None)  # noqa: B023 - called at once
            self._pass.include(call.slots)
            self._pass.reaches_units |= reaches_units
            if is_new:  # after joining, so that the pass fails if this raises
                self._refuse_lost()
            return self._pass

    def _end_pass_before_step(self, optimizer: Optimizer) -> bool:
        """Waits for the pass. Returns false if the optimizer has none of the parameters: a later one may have."""
        own = {id(parameter) for unit in self.units for parameter in unit.parameters}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return False
        self.settle()
        self._refuse_lost()
        return True

    def _refuse_lost(self) -> None:
        for unit in self.units:
            unit.gradients.refuse_lost()

    def _new_pass(self, call: RootCall) -> BackwardPass:
        for unit in self.units:
            unit.begin_gathers(len(call.slots), self.gathers)
            unit.gradients.drop_void()
            # The user's modules have the sharded ones until the pass has ended. Replicas have the full ones.
            unit.show_sharded()
        summed = running_pass().get(PassGradients, lambda _: PassGradients())
        over_machines = self._sums_over_machines(call.computing)
        return BackwardPass(
            call.slots, call.computing, summed, over_machines, self._end_task, self._end_pass_before_step
        )

    def _sums_over_machines(self, computing: Mapping[torch.device, torch.Stream]) -> SumsOverMachines | None:
        """Returns the sums over machines of a new pass; ``None`` with one machine, or if no unit synchronises."""
        if self.machines is None or not any(unit.requires_gradient_sync for unit in self.units):
            return None
        units = [unit.gradients for unit in self.units]
        return SumsOverMachines(units, self.slots, self.order_of_sums, self.machines, computing)

    def _end_task(self, ended: BackwardPass, task: PassOfBackward, ok: bool) -> None:
        """Ends a pass if ``task`` is its last one or has failed. If it fails, every unit is freed."""
        if not ended.leave(task, ok):
            return
        has_failed = not ok
        try:
            if ok:
                with stage("reduce_add"):
                    self._add_up_rest(ended)
        except BaseException:
            has_failed = True
            raise
        finally:
            if has_failed:
                ended.drop([unit.gradients for unit in self.units])
            self._note_pass_end(ended, has_failed)

    def _add_up_rest(self, ended: BackwardPass) -> None:
        for unit in self.units:
            unit.gradients.end_pass(ended)
        ended.publish()
        if ended.over_machines is not None:
            ended.over_machines.end()
        self.make_owners_wait(ended.computing)  # before the hooks on gradients, which may write to shards
        ended.wait_for_sums()

    def _note_pass_end(self, ended: BackwardPass, has_failed: bool) -> None:
        """Frees the units after a pass, and lets threads go on that wait for its end."""
        with self._changed:
            self._pass, self._ending_thread = None, threading.get_ident()
            self._failed = [failed for failed in [*self._failed, ended] if failed.tasks]
        if has_failed and self.gathers is not None and ended.over_machines is None:
            # Other machines may wait for gathers. With sums, these have told them.
            self.gathers.state.fail(error_of_failed_pass())
        try:
            for unit in self.units:
                if ended.reaches_units:
                    for slot_unit in unit.slot_units:
                        slot_unit.note_pass_end(has_failed, ended.is_recorded)
                    unit.sources.drop_pieces()
                unit.end_gathers()
            self.show_current()
            self.make_owners_wait(ended.computing)
            ended.make_callers_wait()
        finally:
            with self._changed:
                self._ending_thread = None
                self._changed.notify_all()

    def make_owners_wait(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Orders later writes to the shards, by streams and by the host, after all pulls and copies of shards."""
        is_offloaded = any(unit.is_offloaded for unit in self.units)
        self.streams.make_owners_wait(computing, is_offloaded)


class RootCall:
    """One call of the root on some slots: the order of its units in forward, and gathers ahead in both directions.

    ``ready``: for each accelerator an event after which shards may be read.
    ``runs_in_backward``: true while the forward runs inside a backward, as in a checkpoint around the root.
    """

    def __init__(self, tree: Tree, slots: Sequence[torch.device]) -> None:
        self.tree, self.slots, self.runs_in_backward = tree, list(slots), _torch.is_in_backward()
        tree.last_call = self
        for unit in tree.units:
            unit.begin_gathers(len(slots), tree.gathers)
            unit.settle, unit.join_pass, unit.streams = tree.settle, tree.join_pass, tree.streams
        self.computing = current_streams(tree.slots)
        ready = tree.take_post_optim_event() or tree.streams.meet("calls", map(Event, self.computing.values()))
        self.ready = {} if ready is None else dict.fromkeys(self.computing, ready)
        self._versions: dict[ShardedUnit, list[int]] = {}
        # For each slot its units in the order in which their forwards began, and ended.
        self._begun: list[list[Unit]] = [[] for _ in slots]
        self._ended: list[list[Unit]] = [[] for _ in slots]
        self.in_graphs: list[list[SlotUnit]] = [[] for _ in slots]  # whose parameters captured graphs read

    def begin_unit(self, unit: Unit, slot: int) -> list[int]:
        """Starts the gathers of the units that follow one whose forward begins. Returns the versions of this one."""
        begun = self._begun[slot]
        if not begun or begun[-1] is not unit:
            begun.append(unit)
        versions = self._versions[unit] = unit.versions()
        ahead = unit.forward_prefetch
        if ahead is None:
            following = self.tree.next_unit.get(unit)
            ahead = [] if following is None else [following]
        for other in ahead:
            other.slot_units[slot].start(self.ready)
        return versions

    def gather_for_graphs(self, slot: int, call: object) -> None:
        """Begins the backward of all units that captured graphs read on a slot, in the ``call`` of the root."""
        for slot_unit in self.in_graphs[slot]:
            slot_unit.unit.refuse_changed(self._versions[slot_unit.unit])
            if slot_unit.begin_backward(call, ends_with_gradients=True):
                slot_unit.make_full(self.ready)

    def end_unit(self, unit: Unit, slot: int) -> int:
        """Notes the end of a unit's forward. Returns the unit's position in the order of these ends."""
        ended = self._ended[slot]
        ended.append(unit)
        return len(ended) - 1

    @cached_property
    def _to_come(self) -> list[int]:
        return [self._bytes_up_to(slot) for slot in range(len(self.slots))]

    def _bytes_up_to(self, slot: int, position: int | None = None) -> int:
        """Returns the bytes of all gradients of the slot's units up to this position, which backward comes to last."""
        units = self._ended[slot] if position is None else self._ended[slot][: position + 1]
        return sum(unit.gradients.full_bytes for unit in units)

    def gather_for_backward(self, unit: Unit, slot_unit: SlotUnit, position: int, running: BackwardPass) -> None:
        """Gathers a unit whose backward comes next, and starts the gathers of units before ``position`` in forward."""
        # A later call of another tree may have bound the unit. The copies of that tree stay, because its gathers may be
        # under way; the gradients are for this tree.
        unit.join_pass = self.tree.join_pass
        running.wait_for_others(self, slot_unit.slot, self._to_come, self._bytes_up_to(slot_unit.slot, position))
        if unit.unshard_in_backward:
            slot_unit.make_full(self.ready)
        ahead = unit.backward_prefetch
        if ahead is None:
            ahead = self._ended[slot_unit.slot][max(position - 1, 0) : position]
        # Sums go first: the slot's next delivery waits for them, and links serve copies in the order of their launches.
        # Kernels that read peers share the links.
        latest, receiving = running.latest_sum, unit.streams.receiving[slot_unit.slot]
        for other in ahead:
            # A unit whose parameters have changed is not gathered ahead, because `ready` is before the change. The
            # unit's own backward refuses the change.
            if not other.unshard_in_backward or other.versions() != self._versions.get(other):
                continue
            if not other.slot_units[slot_unit.slot].is_started:
                if latest is not None and receiving is not None and other.tables is None:
                    latest.make_wait(receiving)
                other.slot_units[slot_unit.slot].start(self.ready)

    def end_forward(self, has_failed: bool) -> None:
        """Notes the order of the units for the next call, after the forward has ended on all slots."""
        self.runs_in_backward = False
        for slot_unit in chain.from_iterable(self.in_graphs):
            slot_unit.end_use()
        order = self._begun[0]
        if not has_failed:
            self.tree.next_unit = dict(reversed([*pairwise(order)]))
        for unit in self.tree.units:
            for slot_unit in unit.slot_units:
                slot_unit.note_forward_end(has_failed)
            if has_failed:
                unit.sources.drop_pieces()
            unit.end_gathers()
        self.tree.show_current()
