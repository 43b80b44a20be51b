"""What happens around a call of a unit's module in a replica and in backward around its nodes; one call of the root.

In forward a unit's gather is started and the next unit's too; the parameters are full while the module runs, and then
they are freed. In backward hooks on tensors do the same, from the last unit to the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.replicas.plan import UNIT_ON_SLOT
from dataparallel.sharded.units.nodes import TensorHooks, with_one_node
from dataparallel.sharded.units.on_slot import UnitOnSlot

if TYPE_CHECKING:
    from dataparallel.sharded.units.passes import BackwardPass
    from dataparallel.sharded.units.tree import Tree
    from dataparallel.sharded.units.unit import Unit


class ModuleOnSlot:
    """One of a unit's modules in the replica of one slot, for one call of the tree.

    ``number``: which of the unit's modules this is. ``places``: where the unit's parameters are registered in this
    replica: registry, name, position in the unit.
    """

    def __init__(
        self, on_slot: UnitOnSlot, number: int, places: Sequence[tuple[dict[str, Any], str, int]], call: ForwardCall
    ) -> None:
        self._on_slot, self._number, self._places, self._call = on_slot, number, places, call
        self._is_running = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, which is a method of the module, with full parameters."""
        if self._is_running:  # the module's `forward` inside of its `__call__`, or a recursion
            return function(*args, **kwargs)
        on_slot, unit = self._on_slot, self._on_slot.unit
        if unit.precision.casts_inputs and unit.precision.parameters is not None:
            args, kwargs = _cast((args, kwargs), unit.precision.parameters)
        this = UnitCall(on_slot, self._call, self)
        this.begin_module(args, kwargs)
        self._is_running = True
        try:
            output = function(*args, **kwargs)
        except BaseException:
            on_slot.end_use()
            raise
        finally:
            self._is_running = False
        if unit.precision.outputs is not None:
            output = _cast(output, unit.precision.outputs)
        return this.end_module(output, self._number, (args, kwargs))

    def register(self, parameters: Sequence[Tensor]) -> None:
        """Registers these parameters in the replica: the full ones, or the sharded ones while there are no others."""
        for registry, name, position in self._places:
            registry[name] = parameters[position]


_run_not_traced = _torch.not_traced(ModuleOnSlot.run)


class UnitInReplica:
    """One of a unit's modules in a replica, for as long as that lives: each call has a `ModuleOnSlot` of its own.

    It is an attribute of the module from the beginning, so that a call leaves the module's attributes as they were.

    Args:
        unit: which of the tree's units.
        number: which of its modules.
        places: where the unit's parameters are registered: number of the module in the replica, name, position.
    """

    def __init__(self, unit: int, number: int, places: Sequence[tuple[int, str, int]]) -> None:
        self.unit, self.number = unit, number
        self._places = places
        self.places: list[tuple[dict[str, Any], str, int]] = []
        self.others: list[UnitInReplica] = []
        self.is_root = False
        self.now: ModuleOnSlot | None = None

    def for_replica(self) -> UnitInReplica:
        """Another one, for a new replica."""
        return UnitInReplica(self.unit, self.number, self._places)

    def made(self, modules: Sequence[nn.Module]) -> None:
        """The replica's modules have their registries now. At the root ``others`` are those of the modules below."""
        registries = [vars(module)["_parameters"] for module in modules]
        self.places = [(registries[at], name, position) for at, name, position in self._places]
        self.is_root = vars(modules[0])[UNIT_ON_SLOT] is self
        if self.is_root:
            below = [vars(module).get(UNIT_ON_SLOT) for module in modules[1:]]
            self.others = [found for found in below if found is not None]

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`ModuleOnSlot.run` for the call that was bound last.

        If a function that the user has compiled calls the module, this runs between two of its graphs.
        """
        run = _run_not_traced if _torch.is_compiler_loaded() else ModuleOnSlot.run
        assert self.now is not None
        return run(self.now, function, *args, **kwargs)


class UnitCall:
    """One call of a unit's module on a slot, until its backward has ended."""

    def __init__(self, on_slot: UnitOnSlot, call: ForwardCall, module: ModuleOnSlot) -> None:
        self._on_slot, self._call, self._module = on_slot, call, module
        self._lock = threading.Lock()
        self._inputs = 0  # that need gradients
        self._awaited = 0  # of them, those whose gradients have not come in this backward
        self._is_open = False
        self._is_recomputation = _torch.is_in_backward()
        self._versions: list[int] = []
        self._position = -1
        self._watched: list[TensorHooks] = []  # of the inputs, which may outlive this call's graph

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the parameters full, and starts the gathers of the units that come next."""
        on_slot = self._on_slot
        on_slot.use(self._call.ready, self._module)
        if not self._is_recomputation:
            try:
                self._versions = self._call.unit_began(on_slot)
            except BaseException:  # no room for a gather ahead
                on_slot.end_use()
                raise
        # Inside a backward, a call without a graph is that of a reentrant checkpoint. Its own backward follows at once.
        if torch.is_grad_enabled() and not (self._is_recomputation and on_slot.is_in_backward):
            self._watch_inputs(args, kwargs)
            if self._is_recomputation:
                self._open()

    def end_module(self, output: Any, number: int, given: Any) -> Any:
        """Watches the gradients of the output, and frees the parameters unless they stay.

        Returns the output, in whose graph the call is one node if it needs to be. ``given``: the call's arguments.
        """
        on_slot = self._on_slot
        on_slot.end_use()
        if self._is_recomputation:
            on_slot.unit.refuse_overwritten(on_slot.slot)
            return output
        self._position = self._call.unit_ended(on_slot)
        has_backward = torch.is_grad_enabled() and (bool(on_slot.unit.recorded) or self._inputs > 0)
        is_announced = False
        if has_backward:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    is_announced = True
                    self._call.hooks_of(on_slot.slot, tensor).call_at_begin(self._backward_begins)
        on_slot.module_ended(number, has_backward, is_announced)
        on_slot.unit.refuse_overwritten(on_slot.slot)  # freed parameters have been looked at
        gets_node = torch.is_grad_enabled() and self._call.gives_one_node(on_slot)
        return with_one_node(output, given) if gets_node else output

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                self._inputs += 1
                hooks = self._call.hooks_of(self._on_slot.slot, tensor)
                hooks.call_at_end(self._input_done)
                self._watched.append(hooks)

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_open, self._awaited = True, self._inputs
        self._on_slot.backward_began(self if self._inputs else None)

    def _backward_begins(self) -> None:
        """An output has its gradient: the unit's nodes run next."""
        with self._lock:
            if self._is_open and self._on_slot.is_full:
                return
            self._open()
        on_slot = self._on_slot
        running = self._call.join_pass()  # first: if this raises, the pass has failed, and frees all units
        if on_slot.unit.versions() != self._versions:
            raise RuntimeError(
                f"a parameter of the unit {on_slot.unit.name!r} was changed in place between forward and backward, "
                "which needs its former values. Step the optimizer after backward"
            )
        on_slot.unit.refuse_overwritten(on_slot.slot)
        self._call.backward_begins(on_slot, self._position, running)
        if on_slot.is_full:
            on_slot.show_in(self._module)

    def _input_done(self) -> None:
        """The gradient of an input is there."""
        with self._lock:
            if not self._is_open:
                return
            self._awaited -= 1
            if self._awaited > 0:
                return
            self._is_open = False
        self._on_slot.backward_ended(self)


def _cast(structure: Any, dtype: torch.dtype) -> Any:
    return _torch.pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, structure)


class ForwardCall:
    """One call of the root.

    Attributes:
        slots: the devices of its replicas.
        computing: for each accelerator the stream that was current when the call began.
        ready: for each accelerator an event after which shards may be read.
    """

    def __init__(self, tree: Tree, slots: Sequence[torch.device]) -> None:
        self._tree, self.slots = tree, list(slots)
        tree.last_call = self
        tree.room.renew()
        for unit in tree.units:
            unit.begin_gathers(len(slots))
            unit.tree = tree.bindings[unit]
        self.computing = current_streams(tree.slots)
        ready = tree.take_post_optim_event() or tree.units[0].streams.meet("calls", map(Event, self.computing.values()))
        self.ready = {} if ready is None else dict.fromkeys(self.computing, ready)
        self._versions: dict[Unit, list[int]] = {}
        self._begun: list[list[Unit]] = [[] for _ in slots]
        self._ended: list[list[Unit]] = [[] for _ in slots]
        # Until the forward ends, so that a tensor between two units has one hook.
        self._hooks: list[dict[int, TensorHooks]] = [{} for _ in slots]

    def hooks_of(self, slot: int, tensor: Tensor) -> TensorHooks:
        """The hooks of this tensor."""
        found = self._hooks[slot].get(id(tensor))
        if found is None or not found.is_of(tensor):
            found = self._hooks[slot][id(tensor)] = TensorHooks(tensor)
        return found

    def unit_began(self, on_slot: UnitOnSlot) -> list[int]:
        """A unit begins: gathers of those that come next are started. Returns its versions."""
        unit, begun = on_slot.unit, self._begun[on_slot.slot]
        if not begun or begun[-1] is not unit:
            begun.append(unit)
        versions = self._versions[unit] = unit.versions()
        ahead = unit.forward_prefetch
        if ahead is None:
            following = self._tree.next_unit.get(unit)
            ahead = [] if following is None else [following]
        for other in ahead:
            other.on_slots[on_slot.slot].start(self.ready, ahead=True)
        return versions

    def unit_ended(self, on_slot: UnitOnSlot) -> int:
        """A unit ends: its position in the order of ends."""
        unit, ended = on_slot.unit, self._ended[on_slot.slot]
        ended.append(unit)
        if unit is self._tree.units[0]:
            self._tree.room.end_forward(on_slot.slot)
        return len(ended) - 1

    def gives_one_node(self, on_slot: UnitOnSlot) -> bool:
        """True if the outputs of the unit's calls get one node, so that their gradients come together.

        Losses of the root's outputs may be separate, except where machines have to gather in the same order.
        """
        return on_slot.unit is not self._tree.units[0] or on_slot.unit.is_sharded_over_machines

    def join_pass(self) -> BackwardPass:
        """The pass of backward that runs now, begun if this is its first node in the tree."""
        running = self._tree.join_pass(self)
        running.is_recorded |= torch.is_grad_enabled()
        return running

    def backward_begins(self, on_slot: UnitOnSlot, position: int, running: BackwardPass) -> None:
        """The backward of a unit that ended at this position comes next. Starts those that come after it."""
        unit = on_slot.unit
        binding = self._tree.bindings[unit]
        if unit.tree is not binding:
            # A later call of another tree has the unit. Its copies and its room stay, because gathers there may be
            # under way; the gradients are for this tree.
            unit.tree = replace(unit.tree, deliver=binding.deliver)
        running.unit_begins(on_slot.slot, position, self._ended)
        running.wait_for_others(on_slot.slot)
        if unit.unshard_in_backward:
            on_slot.make_full(self.ready)
        ahead = unit.backward_prefetch
        if ahead is None:
            ahead = self._ended[on_slot.slot][max(position - 1, 0) : position]
        # Sums go first: the slot's next delivery waits for them, and links serve copies in the order of their launches.
        latest, receiving = running.sums.latest, unit.streams.receiving[on_slot.slot]
        for other in ahead:
            # One whose parameters have changed is left to its own call, which refuses them: `ready` does not cover
            # the change.
            if not other.unshard_in_backward or other.versions() != self._versions.get(other):
                continue
            if not other.on_slots[on_slot.slot].is_started:
                if latest is not None and receiving is not None:
                    latest.make_wait(receiving)
                other.on_slots[on_slot.slot].start(self.ready, ahead=True)

    def end_forward(self, has_failed: bool) -> None:
        """The forward has ended on all slots."""
        self._hooks = [{} for _ in self.slots]
        order = self._begun[0]
        if not has_failed:
            self._tree.next_unit = dict(reversed([*pairwise(order)]))
        for unit in self._tree.units:
            for on_slot in unit.on_slots:
                on_slot.forward_ended(has_failed)
            if has_failed:
                unit.pieces.drop()
            unit.end_gathers()
