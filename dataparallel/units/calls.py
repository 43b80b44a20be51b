"""What happens around a call of a unit's module in a replica, and in backward around its nodes.

Forward: the unit's gather is started and the next unit's too; the parameters are full while the module runs, and then
they are freed. Backward: the gradient of an output announces the unit, so it is gathered again and the one before it is
started. The unit is done when all gradients of its parameters and of the call's inputs are there; then it is freed. A
call inside a backward is a recomputation for a checkpoint. It gathers as well, and leaves the freeing to the backward.

Hooks on tensors do this. One tensor often is the output of one unit and the input of the next. Then the hook first ends
the unit that takes it and then begins the unit that made it, so that the first one's memory is free for the second.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.modules.plan import UNIT_ON_SLOT
from dataparallel.structures import tensors_in
from dataparallel.units.on_slot import UnitOnSlot
from dataparallel.units.outputs import with_one_node

if TYPE_CHECKING:
    from dataparallel.units.tree import ForwardCall

__all__ = ["ModuleOnSlot", "TensorHooks", "UnitCall", "UnitInReplica"]


class ModuleOnSlot:
    """One of a unit's modules in the replica of one slot. Its class lets it run the module's calls.

    Args:
        on_slot: the unit on that slot.
        number: which of the unit's modules this is.
        places: where the unit's parameters are registered in this replica: registry, name, position in the unit.
        call: the call of the tree for which the replica was made.
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
        this.begin(args, kwargs)
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
        return this.end(output, self._number, (args, kwargs))

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

    Attributes:
        is_root: the module is the outermost one of the replica.
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

    def __init__(self, on_slot: UnitOnSlot, call: ForwardCall, registers: ModuleOnSlot) -> None:
        self._on_slot, self._call, self._registers = on_slot, call, registers
        self._lock = threading.Lock()
        self._inputs = 0  # that need gradients
        self._awaited = 0  # of them, those whose gradients have not come in this backward
        self._is_open = False
        self._is_recomputation = _torch.is_in_backward()
        self._versions: list[int] = []
        self._position = -1
        self._watched: list[TensorHooks] = []  # of the inputs, which may outlive this call's graph

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the parameters full, and starts the gathers of the units that come next."""
        on_slot = self._on_slot
        on_slot.use(self._call.ready, self._registers)
        if not self._is_recomputation:
            try:
                self._versions = self._call.began(on_slot)
            except BaseException:  # no room for a gather ahead
                on_slot.end_use()
                raise
        # Inside a backward, a call of which there is no graph yet is that of a reentrant checkpoint. Its own backward
        # follows at once.
        if torch.is_grad_enabled() and not (self._is_recomputation and on_slot.is_in_backward):
            self._watch_inputs(args, kwargs)
            if self._is_recomputation:
                self._open()

    def end(self, output: Any, number: int, given: Any) -> Any:
        """Watches the gradients of the output, and frees the parameters unless they stay.

        Returns the output, in whose graph the call is one node if it needs to be. ``given``: the call's arguments.
        """
        on_slot = self._on_slot
        on_slot.end_use()
        if self._is_recomputation:
            on_slot.unit.refuse_overwritten(on_slot.slot)
            return output
        self._position = self._call.ended(on_slot)
        has_backward = torch.is_grad_enabled() and (bool(on_slot.unit.recorded) or self._inputs > 0)
        is_announced = False
        if has_backward:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    is_announced = True
                    self._call.hooks_of(on_slot.slot, tensor).begin(self._backward_begins)
        on_slot.module_ended(number, has_backward, is_announced)
        on_slot.unit.refuse_overwritten(on_slot.slot)  # freed parameters have been looked at
        gets_node = torch.is_grad_enabled() and self._call.gives_one_node(on_slot)
        return with_one_node(output, given) if gets_node else output

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                self._inputs += 1
                hooks = self._call.hooks_of(self._on_slot.slot, tensor)
                hooks.ends.append(weakref.WeakMethod(self._input_done))
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
            on_slot.show_in(self._registers)

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


class TensorHooks:
    """The hook of one tensor: ends units that take it, then begins units that made it.

    An input may outlive the graphs that use it: a leaf, or a parameter of another unit. So the tensor refers weakly to
    this object, until a unit has made it, and the hook goes with the object. The calls that take it keep it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.ends: list[weakref.WeakMethod[Callable[[], None]]] = []
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

    def begin(self, function: Callable[[], None]) -> None:
        """Has the function called when the tensor has its gradient. The tensor keeps it."""
        self._begins.append(function)
        hook = self._hook()
        assert hook is not None
        hook.keeps = self

    def is_of(self, tensor: Tensor) -> bool:
        """False if it was made for another tensor at the same address."""
        return self._of() is tensor

    def run(self) -> None:
        """The gradient is there."""
        for end in self.ends:
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
            hooks.run()


def _cast(structure: Any, dtype: torch.dtype) -> Any:
    return _torch.pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, structure)
