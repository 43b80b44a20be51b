"""The nodes and hooks of a unit in autograd's graph: of its parameters, of the outputs and inputs of its calls."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node, OneNode, run_first
from dataparallel.batches.batch_types import container_of
from dataparallel.batches.structures import children_of

if TYPE_CHECKING:
    from dataparallel.sharded.units.slot_unit import SlotUnit
    from dataparallel.sharded.units.unit import Unit


def make_outputs(
    tensors: Sequence[Tensor], device: torch.device, receive: Callable[[Sequence[Tensor | None]], None]
) -> None:
    """Makes ``tensors``, parameters of a unit, outputs of a node whose backward gives their gradients to ``receive``.

    The engine runs it when it has all gradients of the unit on the slot that this pass computes, in the thread of the
    slot's device: the moment at which the parameters are not needed any more. The node stays, as the parameters do. It
    refers weakly to the object of the method ``receive``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        handle = torch.empty(0, device=device, requires_grad=True)
        _ToOwners.apply(handle, list(tensors), weakref.WeakMethod(receive))


class _ToOwners(Node):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, tensors: list[Tensor], receive: weakref.WeakMethod[Any]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.receive = receive
        run_first(ctx)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        receive = ctx.receive()
        if receive is None:
            raise RuntimeError("the module whose parameters this graph uses is gone: keep it until backward has ended")
        if any(grad is not None for grad in grads):
            receive(grads)
        return None, None, None


def with_one_node(output: Any, given: Any) -> Any:
    """The nested structure with outputs of one node in place of its tensors, on the same memory.

    So a call's backward begins when all that it gets is there. The gradient of an auxiliary loss comes long before that
    of the block's main output, and would have the block full until the other one comes. Which comes first depends on
    timing, but over machines all have to gather in one order. The node keeps no tensor. A backward that reaches one of
    its outputs reaches all: what made an output without a gradient gets ``None``, and frees what it has saved.

    A tensor is left alone if it has no graph, is sparse, nested or of another class than ``Tensor``, or shares memory
    with another output or with what is ``given``: a change in place would be lost to the other's graph. So are batches
    and given containers. The same object is returned if there are not two tensors that different nodes have made.

    Args:
        output: of the call.
        given: the arguments of the call.
    """
    kept = {id(part): part for part in _parts(given)}
    found = {id(part): part for part in _parts(output, kept) if isinstance(part, Tensor)}
    if len(_makers(found)) < 2:
        return output
    uses = Counter(_memory_of(part) for part in (kept | found).values() if isinstance(part, Tensor))
    joined = {key: tensor for key, tensor in found.items() if _has_own_memory(tensor, uses)}
    if len(_makers(joined)) < 2:
        return output
    joined = {key: tensor for key, tensor in joined.items() if tensor.grad_fn is not None}
    return _replaced(output, dict(zip(joined, OneNode.apply(*joined.values()), strict=True)), kept)


def _makers(tensors: Mapping[int, Tensor]) -> set[Any]:
    """The nodes that have made them."""
    return {tensor.grad_fn for tensor in tensors.values()} - {None}


def _has_own_memory(tensor: Tensor, uses: Mapping[int | None, int]) -> bool:
    memory = _memory_of(tensor)
    return memory is not None and uses[memory] == 1


def _memory_of(tensor: Tensor) -> int | None:
    """A number for its memory; ``None`` if that is unknown."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or id(tensor)  # those without elements share nothing


def _parts(obj: Any, without: Mapping[int, Any] | None = None) -> Iterator[Any]:
    """Containers and leaves of a nested structure, except those in ``without`` and what is below them."""
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


class TensorHooks:
    """The hook of one tensor: ends units that take it, then begins units that made it.

    An input may outlive the graphs that use it: a leaf, or a parameter of another unit. So the tensor refers weakly to
    this object, until a unit has made it, and the hook goes with the object. The calls that take it keep it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._ends: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._begins: list[Callable[[], None]] = []
        self._of = weakref.ref(tensor)
        hook = _Hook(self)
        self._hook = weakref.ref(hook)  # the tensor has it
        self._handles: list[Any] = [tensor.register_hook(hook)]
        base = _torch.base_of(tensor)
        if base is not None and base.grad_fn is not None:
            # If the view is changed in place, its gradient does not pass the hook, but that of its base's node.
            self._handles.append(base.grad_fn.register_prehook(hook))

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()

    def call_at_end(self, method: Callable[[], None]) -> None:
        """Has the method of a call that takes the tensor called when this has its gradient. Nobody keeps it."""
        self._ends.append(weakref.WeakMethod(method))

    def call_at_begin(self, function: Callable[[], None]) -> None:
        """Has the function called after that, for a call that has made the tensor. The tensor keeps it."""
        self._begins.append(function)
        hook = self._hook()
        assert hook is not None
        hook.keeps = self

    def is_of(self, tensor: Tensor) -> bool:
        """False if it was made for another tensor at the same address."""
        return self._of() is tensor

    def gradient_came(self) -> None:
        """Ends the calls that take the tensor, and begins those that made it."""
        for end in self._ends:
            if (input_done := end()) is not None:
                input_done()
        for begin in self._begins:
            begin()


class _Hook:
    """What a tensor has of `TensorHooks`."""

    def __init__(self, hooks: TensorHooks) -> None:
        self._hooks = weakref.ref(hooks)
        self.keeps: TensorHooks | None = None

    @_torch.not_traced
    def __call__(self, grad: object) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.gradient_came()


class Receiver:
    """Takes gradients from the node of one slot."""

    def __init__(self, unit: Unit, slot_unit: SlotUnit) -> None:
        self._unit, self._slot_unit = unit, slot_unit

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Called in the node's backward.

        Raises:
            RuntimeError: the backward is recorded.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True reaches sharded parameters: a graph of their gradients would need them full. Take "
                "gradients of inputs only: torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        self._unit.binding.deliver(self._unit, self._slot_unit.slot, grads)
        self._slot_unit.note_gradients()
