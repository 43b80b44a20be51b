"""`UnitModule` runs a unit's module on one slot with full parameters, between nodes and hooks in autograd's graph.

Before a module runs, its unit and the next one are gathered; afterwards its unit is freed (``slot_unit``). In backward,
hooks on the outputs and nodes on the inputs of the module (`ModuleCall`) do the same, from the last unit to the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.autograd.node import OneNode
from dataparallel.batches.structures import Written, children_of, container_of, entries_of, tensors_in
from dataparallel.comm.streams.current import memory_of
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.plan import UNIT_MODULE
from dataparallel.sharded.units.gather import SlotUnit
from dataparallel.sharded.units.tree import RootCall, Unit
from dataparallel.sharded.units.unit import Precision, Registries


class CapturedModule:
    """One of a unit's modules in what a graph captures: it has full parameters, and gathers nothing."""

    is_root = False

    def __init__(self, precision: Precision) -> None:
        self._precision, self._is_running = precision, False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, a method of the module, with the dtypes of the unit."""
        if self._is_running:
            return function(*args, **kwargs)
        args, kwargs = self._precision.of_inputs((args, kwargs))
        self._is_running = True
        try:
            return self._precision.of_outputs(function(*args, **kwargs))
        finally:
            self._is_running = False


class UnitModule(Registries):
    """One of a unit's modules in a replica, as long as the replica lives. Each call of the root calls `begin_call`.

    It is an attribute of the module from the beginning, so that a call leaves the module's attributes as they were.
    ``number``: which of the unit's modules.
    ``places``: where the parameters are registered: number of the module in the replica, name, position in the unit.
    """

    unit: Unit
    slot_unit: SlotUnit
    root_call: RootCall
    is_running: bool  # inside of a call of the module

    def __init__(self, unit_number: int, number: int, places: Sequence[tuple[int, str, int]]) -> None:
        super().__init__()
        self.unit_number, self.number, self._places = unit_number, number, places
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

    def begin_call(self, unit: Unit, slot: int, root_call: RootCall) -> None:
        """Lets the module run in a call of the root, with a slot's parameters. Until then it has the sharded ones."""
        self.unit, self.slot_unit, self.root_call = unit, unit.slot_units[slot], root_call
        self.is_running = self._is_gathered = False
        self.register(unit.parameters)

    @_torch.not_traced
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, a method of the module, with full parameters.

        If a function that the user has compiled calls the module, this runs between two graphs.
        """
        if self.is_running:  # the module's `forward` inside of its `__call__`, or a recursion
            return function(*args, **kwargs)
        slot_unit, unit = self.slot_unit, self.unit
        if _torch.is_inside_functorch_transform():
            raise RuntimeError(
                f"a torch.func transform (vmap, grad, jvp) runs around the unit {unit.name!r}, whose parameters come "
                "and go in its calls. Make one unit of all that the transform runs: the module whose forward applies it"
            )
        args, kwargs = unit.precision.of_inputs((args, kwargs))
        call = ModuleCall(self)
        slot_unit.use(self.root_call.ready, self)
        try:
            args, kwargs, inputs = call.begin_forward(args, kwargs)
            self.is_running = True
            output = unit.precision.of_outputs(function(*args, **kwargs))
            output = with_own_memory(output, (args, kwargs), slot_unit.flats)
        finally:
            self.is_running = False
            slot_unit.end_use()
        return call.end_forward(output, (args, kwargs), inputs)

    # ---- captured graphs ---------------------------------------------------------------------------------------------

    def for_capture(self) -> CapturedModule:
        """Returns what takes its place in a graph that is captured."""
        return CapturedModule(self.unit.precision)

    def wait_for_all(self) -> None:
        """Makes the parameters full for a graph that is launched next, which reads them where they are.

        They stay so until the forward of the whole tree has ended: a call of another thread would gather them again.
        """
        if not self._is_gathered:
            self._is_gathered = True
            self.slot_unit.use(self.root_call.ready, self)
            self.root_call.in_graphs[self.slot_unit.slot].append(self.slot_unit)
            self.root_call.begin_unit(self.unit, self.slot_unit.slot)


class ModuleCall:
    """One call of a unit's module on a slot, until its backward has ended.

    The backward begins with the first gradient of an output. It ends when a node on an input runs. Without such a node
    it ends with the gradients of the unit's parameters, if all of them need gradients: whatever reads a parameter runs
    before its gradient is complete. Otherwise it ends with the pass.
    """

    def __init__(self, module: UnitModule) -> None:
        self._module, self._root_call = module, module.root_call
        self._unit, self._slot_unit = module.unit, module.slot_unit
        self._is_recomputation = _torch.is_in_backward() and not self._root_call.runs_in_backward
        self._versions: list[int] = []
        self._position = -1
        self._has_input_nodes = self._needs_gradients = False

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], InputNodes]:
        """Starts the gathers of the units that come next. Returns the arguments, some of which are nodes' outputs."""
        slot_unit = self._slot_unit
        if not self._is_recomputation:
            self._versions = self._root_call.begin_unit(self._unit, slot_unit.slot)
        if not torch.is_grad_enabled():
            return args, kwargs, InputNodes(slot_unit.device, self.end_backward, ())
        if self._is_recomputation:
            slot_unit.is_in_backward = True  # the parameters stay, because the call's own backward follows
        needing = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        inputs = InputNodes(slot_unit.device, self.end_backward, needing)
        self._needs_gradients = bool(self._unit.trainable or needing)
        args, kwargs = inputs.pass_on(args), {name: inputs.pass_on(value) for name, value in kwargs.items()}
        self._has_input_nodes = bool(inputs.by_id)
        return args, kwargs, inputs

    def end_forward(self, output: Any, given: Any, inputs: InputNodes) -> Any:
        """Watches the gradients of the output, and frees the parameters unless they stay.

        Returns the output, in whose graph the call is one node if it needs to be. ``given``: the call's arguments.
        """
        slot_unit = self._slot_unit
        if not self._is_recomputation:
            self._position = self._root_call.end_unit(self._unit, slot_unit.slot)
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
        slot_unit.refuse_overwritten()  # freeing has compared the parameters' versions
        # Outputs of the root may have separate losses, except where machines have to gather in the same order.
        is_joined = self._unit is not self._root_call.tree.units[0] or self._unit.gathers is not None
        return with_one_node(output, given) if is_recorded and not self._is_recomputation and is_joined else output

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """Gathers the unit, whose nodes run next: an output has its gradient."""
        slot_unit, unit = self._slot_unit, self._unit
        ends_with_gradients = not self._has_input_nodes and len(unit.trainable) == len(unit.parameters)
        if not slot_unit.begin_backward(self, ends_with_gradients):
            return
        if self._is_recomputation:
            slot_unit.make_full(self._root_call.ready)
        else:
            # This comes first: if it raises, the pass has failed, and frees all units.
            running = self._root_call.tree.join_pass(self._root_call)
            running.is_recorded |= torch.is_grad_enabled()
            unit.refuse_changed(self._versions)
            slot_unit.refuse_overwritten()
            self._root_call.gather_for_backward(unit, slot_unit, self._position, running)
            self._root_call.gather_for_graphs(slot_unit.slot, self)
        if slot_unit.is_full:
            slot_unit.show_in(self._module)

    @_torch.not_traced
    def end_backward(self, grads: object) -> None:
        """Frees the unit, unless another call needs it: no node of this call is left to run."""
        self._slot_unit.end_backward(self)


def with_one_node(output: Any, given: Any) -> Any:
    """Replaces the tensors of a call's output by outputs of one node, on the same memory.

    The call's backward then begins once all gradients of its outputs are there. Otherwise an auxiliary loss would begin
    it long before the gradient of the main output comes, and the unit would be full meanwhile. Also, the first gradient
    would depend on timing, while all machines have to gather in one order. The node keeps no tensor. A backward that
    reaches one output reaches all: what made an output without a gradient gets ``None`` and frees its saved tensors.

    A tensor is left alone if it has no graph, is sparse, nested or of another class than ``Tensor``, or shares memory
    with another output or an argument: a change in place would be lost to the other tensor's graph. Batches and
    containers among the arguments are left alone too. If fewer than two nodes made the tensors, ``output`` is returned.
    """
    kept = {id(part): part for part in _parts(given)}
    found = {id(part): part for part in _parts(output, kept) if isinstance(part, Tensor)}
    uses = Counter(_memory_of(part) for part in (kept | found).values() if isinstance(part, Tensor))
    uses[None] = 0
    joined = {key: each for key, each in found.items() if each.grad_fn is not None and uses[_memory_of(each)] == 1}
    if len({tensor.grad_fn for tensor in joined.values()}) < 2:
        return output
    return _replaced(output, dict(zip(joined, OneNode.apply(*joined.values()), strict=True)), kept)


def with_own_memory(output: Any, given: Any, full: Sequence[Tensor]) -> Any:
    """Returns a call's output with copies of tensors in the memory of the ``full`` parameters, which will be freed.

    Such tensors that the call has written into dicts and lists among its arguments, ``given``, are replaced there.
    """
    addresses = {flat.untyped_storage().data_ptr() for flat in full} - {0}
    copies = {id(part): part.clone() for part in _parts(output) if _lies_in(addresses, part)}
    for part in _parts(given):
        for key, value in (entries_of(part) or {}).items():
            if _lies_in(addresses, value):
                Written(part, key, []).hand_back(value.clone())
    return _replaced(output, copies, {}) if copies else output


def _lies_in(addresses: set[int], part: Any) -> bool:
    memory = memory_of(part) if isinstance(part, Tensor) else ()
    return any(each.untyped_storage().data_ptr() in addresses for each in memory if each.layout is torch.strided)


def _memory_of(tensor: Tensor) -> int | None:
    """Returns a number for the tensor's memory; ``None`` if the memory is unknown."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or id(tensor)  # tensors without elements share nothing


def _parts(obj: Any, without: Mapping[int, Any] | None = None) -> Iterator[Any]:
    """Yields containers and leaves of a nested structure, but nothing in or below those in ``without``."""
    if without is not None and id(obj) in without:
        return
    yield obj
    for _, child in children_of(obj, "") or ():
        yield from _parts(child, without)


def _replaced(obj: Any, new: Mapping[int, Tensor], kept: Mapping[int, Any]) -> Any:
    if id(obj) in new:
        return new[id(obj)]
    children = None if id(obj) in kept else children_of(obj, "")
    if children is None:
        return obj
    values = [_replaced(child, new, kept) for _, child in children]
    if all(value is child for value, (_, child) in zip(values, children, strict=True)):
        return obj
    container = container_of(obj)
    assert container is not None  # it has children
    return container.rebuild(obj, values)


def before_gradient(tensor: Tensor, function: Callable[[], None]) -> None:
    """Calls ``function`` in each backward when the gradient of ``tensor`` is there. The tensor's graph keeps it.

    Leaves, full parameters and their views are left alone: they outlive the graph, and no node that made them reads a
    parameter.
    """

    @_torch.not_traced
    def hook(grad: object) -> None:
        function()

    base = _torch.base_of(tensor)
    if tensor.is_leaf or isinstance(tensor if base is None else base, ReplicaParameter):
        return
    tensor.register_hook(hook)
    if base is not None and base.grad_fn is not None:
        # If the view is changed in place, its gradient passes a hook of its base's node, not a hook of the tensor.
        base.grad_fn.register_prehook(hook)


class InputNodes:
    """The inputs of a call that need gradients. Inside of the call each is the output of a node, on the same memory.

    A node calls ``at_end`` when it runs. The nodes are made before all other nodes of the call, and the engine's thread
    of a device runs ready nodes from the last made to the first. So when one of them runs, no other node of the call is
    left to run there, also where the same tensor goes to later calls, whose gradients are still missing.

    A tensor stays as it is if it is in a list or a dict, which the call may change, is of another class than
    ``Tensor``, sparse, or on another device than the slot's.
    """

    def __init__(self, device: torch.device, at_end: Callable[[Any], None], needing: Sequence[Tensor]) -> None:
        self._device, self._at_end = device, at_end
        self.by_id: dict[int, tuple[Tensor, Tensor, Any]] = {}  # the input, the node's output, the node
        self._makers = {id(tensor): (tensor, tensor.grad_fn) for tensor in needing}  # of all inputs that need gradients

    def has_unchanged(self, tensor: Tensor) -> bool:
        return id(tensor) in self._makers and self._makers[id(tensor)][1] is tensor.grad_fn

    def written_into(self, given: Any) -> list[Tensor]:
        """Returns the tensors that need gradients and that the call has put into its arguments, ``given``."""
        known = {*self._makers, *(id(passed) for _, passed, _ in self.by_id.values())}
        return [tensor for tensor in tensors_in(given) if tensor.requires_grad and id(tensor) not in known]

    def pass_on(self, obj: Any) -> Any:
        """Returns the nested arguments with the nodes' outputs."""
        if isinstance(obj, tuple):
            children = [self.pass_on(child) for _, child in children_of(obj, "") or ()]
            if all(map(is_, children, obj)):
                return obj
            container = container_of(obj)
            assert container is not None  # it has children
            return container.rebuild(obj, children)
        is_plain = type(obj) is Tensor and obj.layout is torch.strided and obj.device == self._device
        if not is_plain or not obj.requires_grad:
            return obj
        if id(obj) not in self.by_id:
            (passed,) = OneNode.apply(obj)
            passed.grad_fn.register_prehook(self._at_end)
            self.by_id[id(obj)] = obj, passed, passed.grad_fn
        return self.by_id[id(obj)][1]

    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the inputs that the call has changed in place, each with the node's output, whose graph has that."""
        return [(tensor, passed) for tensor, passed, node in self.by_id.values() if passed.grad_fn is not node]

    def hand_back(self, output: Any, given: Any) -> Any:
        """Returns the output with inputs in place of the nodes' outputs, and makes changes those of the inputs."""
        for tensor, passed in self.changed():
            version = _torch.version_of(tensor)
            tensor.copy_(passed)
            _torch.set_versions((tensor,), (version,))  # the values are the same, and other nodes may have saved them
        if not self.by_id:
            return output
        originals = {id(passed): tensor for tensor, passed, _ in self.by_id.values()}
        return _replaced(output, originals, {id(part): part for part in _parts(given)})
