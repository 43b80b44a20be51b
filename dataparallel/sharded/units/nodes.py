"""Puts nodes and hooks of a unit into autograd's graph: `make_outputs` for its parameters, the others for its calls.

`reach_parameters` lets ``backward(inputs=[...])`` reach sharded parameters, which are in no graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node, OneNode, run_first
from dataparallel.autograd.pass_of_backward import running_pass
from dataparallel.batches.structures import Written, children_of, container_of, entries_of, tensors_in
from dataparallel.comm.kinds import alias
from dataparallel.comm.streams.current import memory_of
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.gather import SlotUnit
from dataparallel.sharded.units.sharded_unit import ShardedUnit


def make_outputs(
    tensors: Sequence[Tensor], device: torch.device, receive: Callable[[Sequence[Tensor | None]], None]
) -> None:
    """Makes ``tensors``, parameters of a unit, outputs of a node whose backward passes their gradients to ``receive``.

    The engine runs the node, in the thread of the slot's device, once it has all gradients of the unit on the slot.
    From then on the parameters are not needed any more. The node lives as long as the parameters. It refers weakly to
    the object of the method ``receive``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        handle = torch.empty(0, device=device, requires_grad=True)
        ToOwners.apply(handle, list(tensors), weakref.WeakMethod(receive))


class ToOwners(Node):
    """The node of `make_outputs`."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, tensors: list[Tensor], receive: weakref.WeakMethod[Any]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.receive = receive
        run_first(ctx)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        """Passes their gradients on."""
        receive = ctx.receive()
        if receive is None:
            raise RuntimeError(
                "the parameters that this graph uses are gone: their module is, or before its next call one of them "
                "was replaced, or its requires_grad or dtype was changed. Call backward() before that, or call the "
                "module again"
            )
        if any(grad is not None for grad in grads):
            receive(grads)
        return None, None, None


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

    A node's backward calls ``at_end``. The nodes are made before all other nodes of the call, and the engine's thread
    of a device runs ready nodes from the last made to the first. So when one of them runs, no other node of the call is
    left to run there, also where the same tensor goes to later calls, whose gradients are still missing.

    A tensor stays as it is if it is in a list or a dict, which the call may change, is of another class than
    ``Tensor``, sparse, or on another device than the slot's.
    """

    def __init__(self, device: torch.device, at_end: Callable[[], None]) -> None:
        self._device, self._at_end = device, at_end
        self._by_id: dict[int, tuple[Tensor, Tensor, Any]] = {}  # the input, the node's output, the node
        self._makers: dict[int, tuple[Tensor, Any]] = {}  # of all inputs that need gradients

    @property
    def is_empty(self) -> bool:
        return not self._by_id

    def note(self, tensors: Sequence[Tensor]) -> None:
        self._makers = {id(tensor): (tensor, tensor.grad_fn) for tensor in tensors}

    def has_unchanged(self, tensor: Tensor) -> bool:
        return id(tensor) in self._makers and self._makers[id(tensor)][1] is tensor.grad_fn

    def written_into(self, given: Any) -> list[Tensor]:
        """Returns the tensors that need gradients and that the call has put into its arguments, ``given``."""
        known = {*self._makers, *(id(passed) for _, passed, _ in self._by_id.values())}
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
        if id(obj) not in self._by_id:
            passed = _InputNode.apply(self._at_end, obj)
            self._by_id[id(obj)] = obj, passed, passed.grad_fn
        return self._by_id[id(obj)][1]

    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the inputs that the call has changed in place, each with the node's output, whose graph has that."""
        return [(tensor, passed) for tensor, passed, node in self._by_id.values() if passed.grad_fn is not node]

    def hand_back(self, output: Any, given: Any) -> Any:
        """Returns the output with inputs in place of the nodes' outputs, and makes changes those of the inputs."""
        for tensor, passed in self.changed():
            version = _torch.version_of(tensor)
            tensor.copy_(passed)
            _torch.set_versions((tensor,), (version,))  # the values are the same, and other nodes may have saved them
        if not self._by_id:
            return output
        originals = {id(passed): tensor for tensor, passed, _ in self._by_id.values()}
        return _replaced(output, originals, {id(part): part for part in _parts(given)})


class _InputNode(Node):
    @staticmethod
    def forward(ctx: Any, at_end: Callable[[], None], tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.at_end = at_end
        return alias(tensor, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        ctx.at_end()
        return None, grad


CHOSEN = object()
"""The key in a pass's ``contents`` under which are the ids of the parameters that ``backward(inputs=...)`` names."""


class Receiver:
    """Passes gradients from the node of one slot to the tree. ``first``: the full parameters of slot 0."""

    def __init__(self, unit: ShardedUnit, slot_unit: SlotUnit, first: Sequence[Tensor]) -> None:
        self._unit, self._slot_unit, self._first = unit, slot_unit, first

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Called in the node's backward, which may not be recorded."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True reaches sharded parameters: a graph of their gradients would need them full. Take "
                "gradients of inputs only: torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        chosen: Any = running_pass().contents.get(CHOSEN)
        grads = [g if self._takes(i, chosen) else None for i, g in zip(self._unit.trainable, grads, strict=True)]
        assert self._unit.deliver is not None  # a call has made the graph
        self._unit.deliver(self._slot_unit.slot, grads)
        self._slot_unit.note_gradients()

    def takes_any(self, chosen: Collection[int]) -> bool:
        """True if the unit has a parameter that needs a gradient with one of these ids, or slot 0's copy of it."""
        return any(self._takes(i, chosen) for i in self._unit.trainable)

    def _takes(self, i: int, chosen: Collection[int] | None) -> bool:
        parameter = self._unit.parameters[i]
        if not parameter.requires_grad:  # any more
            return False
        return chosen is None or id(parameter) in chosen or id(self._first[i]) in chosen


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
