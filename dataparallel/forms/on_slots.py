"""Methods that run on the slots: how a call of a managed module's method becomes a call on all slots.

`OnSlots` is what a form's class has in place of ``forward``, and of other methods that users register; `StateOnSlots`
is the base of the forms' states, which makes the call. This file knows no form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.fx
from torch import nn

from dataparallel import _torch
from dataparallel.batches.chunk_sizes import ChunkSizes
from dataparallel.call.engine import CallEngine, Method, ReplicaMaker
from dataparallel.call.options import BatchSplit, CallOptions
from dataparallel.devices import resolve_slots
from dataparallel.forms.managed import KEY, ManagedModule, held_by, original_class
from dataparallel.forms.signatures import StandIns, left_alone
from dataparallel.replicas.plan import UNIT_ON_SLOT


def state_of(module: Any) -> Any:
    """The state of a managed module.

    Raises:
        RuntimeError: it has none, because it is a copy of a managed module.
    """
    form, state = vars(module).get(KEY, (None, None))
    if form is None:
        raise RuntimeError(
            f"this {type(module).__name__} was not made by a composable form, but copied from one that was"
        )
    return state


class StateOnSlots(ReplicaMaker):
    """The state of a form whose modules run on slots.

    Attributes:
        options: of the calls; they may be assigned between calls.
        slots: where replicas run; none if there is no accelerator.
        methods: names of methods that run on replicas.
    """

    def __init__(self, options: CallOptions) -> None:
        self.options = options
        self.slots = resolve_slots(options.slots) if options.slots else []
        self.methods = {"forward"}

    @property
    def chunk_sizes(self) -> ChunkSizes:
        """How the slots share a batch: may be assigned between calls, as that of `dataparallel.DataParallel`."""
        return self.options.split.given

    @chunk_sizes.setter
    def chunk_sizes(self, given: ChunkSizes) -> None:
        self.options.split = BatchSplit(given, len(self.slots))

    def run(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``method`` for the whole batch: see `CallEngine.run`."""
        return CallEngine(self.options, self).run(method, inputs, kwargs)


class OnSlots:
    """A method that runs on the slots: a function on the class, bound on a module, with the signature of the original.

    Python finds a data descriptor before an attribute of the instance. So ``m.forward = f`` stores ``f`` in the
    instance's ``__dict__``, where the replicas find it, and the call is still split.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._functions = {traced: StandIns(self._around, traced) for traced in (True, False)}

    @_torch.leave_alone
    def __get__(self, module: Any, cls: type) -> Any:
        if module is None:
            if not issubclass(cls, nn.Module):
                return self  # the class is no module's
            original = original_class(cls)
            if isinstance(inspect.getattr_static(original, self._name), FunctionType):
                return self._functions[True].of(getattr(original, self._name))
            return getattr(original, self._name)  # for example a static method, which takes no module
        held, state = held_by(module, self._name), state_of(module)
        if self._name not in state.methods:
            return held
        if torch.compiler.is_dynamo_compiling():  # the compiler needs no signature
            return functools.partial(self._call, module, held)
        # In a replica, and without slots, the method itself runs, and the compiler may compile it.
        traced = not state.slots or UNIT_ON_SLOT in vars(module)
        if isinstance(held, MethodType) and held.__self__ is module:
            return MethodType(self._functions[traced].of(held.__func__), module)

        # A lambda on the instance, a partial, a method of another object: all are called without the module.
        @functools.wraps(held)
        def on_slots(*args: Any, **kwargs: Any) -> Any:
            # The user may have stored this function, or a wrapper around it, on the module. Then replicas hold it too,
            # and there `module` and `held` are the replica's.
            return self._call(module, held, *args, **kwargs)

        return on_slots if traced else left_alone(on_slots)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if self._name not in vars(module):
            raise AttributeError(self._name)
        del vars(module)[self._name]

    def _around(self, method: Any) -> FunctionType:
        def on_slots(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, functools.partial(method, module), *args, **kwargs)

        functools.update_wrapper(on_slots, method)
        return cast(FunctionType, on_slots)

    def _call(self, module: Any, held: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Splits the call, except in a replica and while ``torch.fx`` traces a graph: there it runs ``held``."""
        _, state = vars(module).get(KEY, (None, None))
        if state is None or self._name not in state.methods or _is_traced(args, kwargs):
            return held(*args, **kwargs)
        return module._dataparallel_run(Method(self._name, held), args, kwargs)


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if ``torch.fx`` records the call; then there is no tensor to split."""
    return any(isinstance(value, torch.fx.Proxy) for value in (*args, *kwargs.values()))


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes the method ``name`` run as ``forward`` does: scatters its arguments, gathers what replicas return.

    This holds for modules that are replicated, and for those that are fully sharded: in a replica of their tree the
    method gathers the parameters of their unit first.

    Raises:
        TypeError: ``module`` has no form, or its attribute of this name cannot be called.
        AttributeError: ``module`` has no attribute of this name.
    """
    if not isinstance(module, ManagedModule):
        raise TypeError(
            f"this {type(module).__name__} is not replicated; call replicate(module) before, or fully_shard(module)"
        )
    own = original_class(type(module)).__name__
    try:
        held = held_by(module, name)
    except AttributeError:
        raise AttributeError(f"a {own} has no method {name!r}") from None
    if not callable(held):
        raise TypeError(f"{name!r} of this {own} is no method")
    cls = type(module)
    if name != "forward" and name not in vars(cls):
        setattr(cls, name, OnSlots(name))
    state_of(module).methods.add(name)
