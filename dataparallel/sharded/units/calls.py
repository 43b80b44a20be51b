"""`UnitModule` runs a unit's module on one slot with full parameters; `RootCall` is one call of the root.

Before a module runs, its unit and the next one are gathered; afterwards its unit is freed (``slot_unit``). In backward,
hooks on the outputs and nodes on the inputs of the module (`ModuleCall`) do the same, from the last unit to the first.
`reach_parameters` lets ``backward(inputs=[...])`` reach sharded parameters, which are in no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import running_pass
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.plan import UNIT_MODULE
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.nodes import (
    CHOSEN,
    InputNodes,
    Receiver,
    ToOwners,
    before_gradient,
    with_one_node,
    with_own_memory,
)
from dataparallel.sharded.units.slot_unit import SlotUnit

if TYPE_CHECKING:
    from dataparallel.sharded.units.tree import BackwardPass, Tree
    from dataparallel.sharded.units.unit import Precision, RegistryEntry, Unit


class CapturedModule:
    """One of a unit's modules in what a graph captures: it has full parameters, and gathers nothing."""

    is_root = False

    def __init__(self, precision: Precision) -> None:
        self._precision, self._is_running = precision, False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, a method of the module, with the dtypes of the unit."""
        if self._is_running:
            return function(*args, **kwargs)
        args, kwargs = self._precision.of_inputs((args, kwargs))
        self._is_running = True
        try:
            return self._precision.of_outputs(function(*args, **kwargs))
        finally:
            self._is_running = False


class UnitModule:
    """One of a unit's modules in a replica, as long as the replica lives. Each call of the root calls `begin_call`.

    It is an attribute of the module from the beginning, so that a call leaves the module's attributes as they were.
    ``number``: which of the unit's modules.
    ``places``: where the parameters are registered: number of the module in the replica, name, position in the unit.
    """

    slot_unit: SlotUnit
    root_call: RootCall
    is_running: bool  # inside of a call of the module

    def __init__(self, unit_number: int, number: int, places: Sequence[tuple[int, str, int]]) -> None:
        self.unit_number, self.number, self._places = unit_number, number, places
        self.entries: list[RegistryEntry] = []  # `places` with the registries of this replica
        self.lower_unit_modules: list[UnitModule] = []  # at the root, of all modules below
        self.is_root = False

    def for_replica(self) -> UnitModule:
        """Returns the same for a new replica, whose registries `find_registries` finds."""
        return UnitModule(self.unit_number, self.number, self._places)

    def find_registries(self, modules: Sequence[nn.Module]) -> None:
        """Looks up the registries in a new replica's ``modules``, the root first, once all of them have theirs."""
        registries = [vars(module)["_parameters"] for module in modules]
        self.entries = [(registries[at], name, position) for at, name, position in self._places]
        self.is_root = vars(modules[0])[UNIT_MODULE] is self
        if self.is_root:
            below = [vars(module).get(UNIT_MODULE) for module in modules[1:]]
            self.lower_unit_modules = [unit_module for unit_module in below if unit_module is not None]

    def begin_call(self, slot_unit: SlotUnit, root_call: RootCall) -> None:
        """Lets the module run in a call of the root, with a slot's parameters. Until then it has the sharded ones."""
        self.slot_unit, self.root_call = slot_unit, root_call
        self.is_running = self._is_gathered = False
        self.register(slot_unit.unit.parameters)

    def register(self, parameters: Sequence[Tensor]) -> None:
        """Registers ``parameters`` in the replica: the full ones, or the sharded ones while the unit is not full."""
        for registry, name, position in self.entries:
            registry[name] = parameters[position]

    @_torch.not_traced
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, a method of the module, with full parameters.

        If a function that the user has compiled calls the module, this runs between two graphs.
        """
        if self.is_running:  # the module's `forward` inside of its `__call__`, or a recursion
            return function(*args, **kwargs)
        slot_unit, unit = self.slot_unit, self.slot_unit.unit
        if _torch.is_inside_functorch_transform():
            raise RuntimeError(
                f"a torch.func transform (vmap, grad, jvp) runs around the unit {unit.name!r}, whose parameters come "
                "and go in its calls. Make one unit of all that the transform runs: the module whose forward applies it"
            )
        args, kwargs = unit.precision.of_inputs((args, kwargs))
        call = ModuleCall(self)
        inputs = InputNodes(slot_unit.device, call.end_backward)
        args, kwargs = call.begin_forward(args, kwargs, inputs)
        self.is_running = True
        try:
            output = function(*args, **kwargs)
        except BaseException:
            slot_unit.end_use()
            raise
        finally:
            self.is_running = False
        return call.end_forward(unit.precision.of_outputs(output), (args, kwargs), inputs)

    # ---- captured graphs ---------------------------------------------------------------------------------------------

    def for_capture(self) -> CapturedModule:
        """Returns what takes its place in a graph that is captured."""
        return CapturedModule(self.slot_unit.unit.precision)

    def wait_for_all(self) -> None:
        """Makes the parameters full for a graph that is launched next, which reads them where they are.

        They stay so until the forward of the whole tree has ended: a call of another thread would gather them again.
        """
        if not self._is_gathered:
            self._is_gathered = True
            self.slot_unit.use(self.root_call.ready, self)
            self.root_call.in_graphs[self.slot_unit.slot].append(self.slot_unit)
            self.root_call.begin_unit(self.slot_unit)

    @property
    def ends_with_sums(self) -> bool:
        """True if each backward ends after the sums of its gradients, so that the next one may overwrite these."""
        return self.root_call.ends_with_sums


class ModuleCall:
    """One call of a unit's module on a slot, until its backward has ended.

    The backward begins with the first gradient of an output. It ends when a node on an input runs. Without such a node
    it ends with the gradients of the unit's parameters, if all of them need gradients: whatever reads a parameter runs
    before its gradient is complete. Otherwise it ends with the pass.
    """

    def __init__(self, module: UnitModule) -> None:
        self._module, self._slot_unit, self._root_call = module, module.slot_unit, module.root_call
        self._is_recomputation = _torch.is_in_backward()
        self._versions: list[int] = []
        self._position = -1
        self._has_input_nodes = self._needs_gradients = False

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: InputNodes
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes the parameters full, and starts the gathers of the units that come next. Returns the arguments."""
        slot_unit = self._slot_unit
        slot_unit.use(self._root_call.ready, self._module)
        try:
            if not self._is_recomputation:
                self._versions = self._root_call.begin_unit(slot_unit)
            if not torch.is_grad_enabled():
                return args, kwargs
            if self._is_recomputation:
                slot_unit.is_in_backward = True  # the parameters stay, because the call's own backward follows
            needing = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            inputs.note(needing)
            self._needs_gradients = bool(slot_unit.unit.trainable or needing)
            args, kwargs = inputs.pass_on(args), {name: inputs.pass_on(value) for name, value in kwargs.items()}
            self._has_input_nodes = not inputs.is_empty
            return args, kwargs
        except BaseException:  # for example, a device has no memory for a gather ahead
            slot_unit.end_use()
            raise

    def end_forward(self, output: Any, given: Any, inputs: InputNodes) -> Any:
        """Watches the gradients of the output, and frees the parameters unless they stay.

        Returns the output, in whose graph the call is one node if it needs to be. ``given``: the call's arguments.
        """
        slot_unit = self._slot_unit
        try:
            output = with_own_memory(output, given, slot_unit.flats)
        finally:
            slot_unit.end_use()
        if not self._is_recomputation:
            self._position = self._root_call.end_unit(slot_unit)
        output, is_recorded = inputs.hand_back(output, given), torch.is_grad_enabled()
        written = inputs.written_into(given) if is_recorded else []
        tensors = [*tensors_in(output), *written, *(tensor for tensor, _ in inputs.changed())]
        needing = [tensor for tensor in tensors if tensor.requires_grad] if is_recorded else []
        for tensor in needing:
            if not inputs.has_unchanged(tensor):  # an input's gradient says nothing of this call's nodes
                before_gradient(tensor, self._begin_backward)
        if not self._is_recomputation:
            # Gradients may also come to tensors that are hidden in the output, or in attributes of modules.
            is_trained = any(unit.trainable for unit in self._root_call.tree.units)
            may_be_hidden = self._needs_gradients or (not tensors and is_trained)
            has_backward = bool(needing) or (is_recorded and may_be_hidden)
            slot_unit.note_module_end(self._module.number, has_backward, is_announced=bool(needing))
        slot_unit.unit.refuse_overwritten(slot_unit.slot)  # freeing has compared the parameters' versions
        if is_recorded and not self._is_recomputation and self._root_call.gives_one_node(slot_unit):
            return with_one_node(output, given)
        return output

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """Gathers the unit, whose nodes run next: an output has its gradient."""
        slot_unit, unit = self._slot_unit, self._slot_unit.unit
        ends_with_gradients = not self._has_input_nodes and len(unit.trainable) == len(unit.parameters)
        if not slot_unit.begin_backward(self, ends_with_gradients):
            return
        if self._is_recomputation:
            slot_unit.make_full(self._root_call.ready)
        else:
            running = self._root_call.join_pass()  # first: if this raises, the pass has failed, and frees all units
            unit.refuse_changed(self._versions)
            unit.refuse_overwritten(slot_unit.slot)
            self._root_call.gather_for_backward(slot_unit, self._position, running)
            self._root_call.gather_for_graphs(slot_unit.slot, self)
        if slot_unit.is_full:
            slot_unit.show_in(self._module)

    def end_backward(self) -> None:
        """Frees the unit, unless another call needs it: no node of this call is left to run."""
        self._slot_unit.end_backward(self)


class RootCall:
    """One call of the root on some slots: the order of its units in forward, and gathers ahead in both directions.

    ``ready``: for each accelerator an event after which shards may be read.
    """

    def __init__(self, tree: Tree, slots: Sequence[torch.device]) -> None:
        self.tree, self.slots = tree, list(slots)
        tree.last_call = self
        for unit in tree.units:
            unit.begin_gathers(len(slots), tree.gathers)
            unit.tree = unit.delivers_to = tree
            unit.copies = tree.copies
        self.computing = current_streams(tree.slots)
        ready = tree.take_post_optim_event() or tree.units[0].streams.meet("calls", map(Event, self.computing.values()))
        self.ready = {} if ready is None else dict.fromkeys(self.computing, ready)
        self._versions: dict[Unit, list[int]] = {}
        # For each slot its units in the order in which their forwards began, and ended.
        self._begun: list[list[Unit]] = [[] for _ in slots]
        self._ended: list[list[Unit]] = [[] for _ in slots]
        self.in_graphs: list[list[SlotUnit]] = [[] for _ in slots]  # whose parameters captured graphs read

    def begin_unit(self, slot_unit: SlotUnit) -> list[int]:
        """Starts the gathers of the units that follow one whose forward begins. Returns the versions of this one."""
        unit, begun = slot_unit.unit, self._begun[slot_unit.slot]
        if not begun or begun[-1] is not unit:
            begun.append(unit)
        versions = self._versions[unit] = unit.versions()
        ahead = unit.forward_prefetch
        if ahead is None:
            following = self.tree.next_unit.get(unit)
            ahead = [] if following is None else [following]
        for other in ahead:
            other.slot_units[slot_unit.slot].start(self.ready)
        return versions

    def gather_for_graphs(self, slot: int, call: ModuleCall) -> None:
        """Begins the backward of all units that captured graphs read on a slot, in the ``call`` of the root."""
        for slot_unit in self.in_graphs[slot]:
            slot_unit.unit.refuse_changed(self._versions[slot_unit.unit])
            if slot_unit.begin_backward(call, ends_with_gradients=True):
                slot_unit.make_full(self.ready)

    @property
    def ends_with_sums(self) -> bool:
        """True if each backward ends after the sums of its gradients."""
        return all(unit.is_last_backward for unit in self.tree.units)

    def end_unit(self, slot_unit: SlotUnit) -> int:
        """Notes the end of a unit's forward. Returns the unit's position in the order of these ends."""
        ended = self._ended[slot_unit.slot]
        ended.append(slot_unit.unit)
        return len(ended) - 1

    def gives_one_node(self, slot_unit: SlotUnit) -> bool:
        """True if all outputs of a call of the unit get one node, so that their gradients come together.

        Outputs of the root may have separate losses, except where machines have to gather in the same order.
        """
        return slot_unit.unit is not self.tree.units[0] or slot_unit.unit.is_sharded_over_machines

    def join_pass(self) -> BackwardPass:
        """Returns the pass of backward that runs now. The pass begins here if this is its first node in the tree."""
        running = self.tree.join_pass(self)
        running.is_recorded |= torch.is_grad_enabled()
        return running

    def gather_for_backward(self, slot_unit: SlotUnit, position: int, running: BackwardPass) -> None:
        """Gathers a unit whose backward comes next, and starts the gathers of units before ``position`` in forward."""
        unit = slot_unit.unit
        # A later call of another tree may have bound the unit. The copies of that tree stay, because its gathers may be
        # under way; the gradients are for this tree.
        unit.delivers_to = self.tree
        running.note_unit_begun(slot_unit.slot, position, self._ended)
        running.wait_for_others(slot_unit.slot)
        if unit.unshard_in_backward:
            slot_unit.make_full(self.ready)
        ahead = unit.backward_prefetch
        if ahead is None:
            ahead = self._ended[slot_unit.slot][max(position - 1, 0) : position]
        # Sums go first: the slot's next delivery waits for them, and links serve copies in the order of their launches.
        # Kernels that read peers share the links.
        latest, receiving = running.sums.latest_sum, unit.streams.receiving[slot_unit.slot]
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
        for slot_unit in chain.from_iterable(self.in_graphs):
            slot_unit.end_use()
        order = self._begun[0]
        if not has_failed:
            self.tree.next_unit = dict(reversed([*pairwise(order)]))
        for unit in self.tree.units:
            for slot_unit in unit.slot_units:
                slot_unit.note_forward_end(has_failed)
            if has_failed:
                unit.pieces.drop()
            unit.end_gathers()
        self.tree.show_current()


def reach_parameters() -> None:
    """Wraps the function with which torch starts its engine, once."""
    _torch.wrap_engine(lambda run_engine: partial(_run_engine, run_engine))


@_torch.not_traced
def _run_engine(
    run_engine: Callable[..., Any],
    outputs: Sequence[Any],
    grads: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    chosen = {id(each) for each in inputs if isinstance(each, (ShardedTensor, ReplicaParameter))}
    nodes = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs] if chosen else []
    roots = [node for node in nodes if node is not None]
    leaves = [leaf for receiver, leaf in _receivers_behind(roots) if receiver.takes_any(chosen)]
    if not leaves:
        return run_engine(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
    if not kwargs["accumulate_grad"]:
        raise RuntimeError(
            "torch.autograd.grad cannot return gradients of sharded parameters, which are summed when the backward has "
            "ended: call loss.backward(inputs=[...]) with these parameters, and read their .grad"
        )
    # A backward of another thread through the same units has all gradients.
    handles = [root.register_prehook(lambda _: running_pass().contents.update({CHOSEN: chosen})) for root in roots]
    kept = [each for each in inputs if not isinstance(each, ReplicaParameter)]  # full parameters have no `.grad`
    try:
        return run_engine(outputs, grads, retain_graph, create_graph, (*kept, *leaves), *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _receivers_behind(roots: Sequence[Any]) -> Iterator[tuple[Receiver, Any]]:
    """Finds the nodes of units behind these nodes: yields their receivers, each with the leaf behind its node."""
    seen: set[Any] = set()
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        if getattr(type(node), "_forward_cls", None) is ToOwners and (receive := node.receive()) is not None:
            yield receive.__self__, node.next_functions[0][0].variable
