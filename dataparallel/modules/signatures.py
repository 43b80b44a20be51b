"""Functions that stand for others and show their signature, for code that asks before it calls.

transformers, accelerate and Lightning read ``inspect.signature(model.forward)``, compare bound methods and look for
their ``__func__``. So what stands for a module's ``forward`` has to be a function on the class and a bound method on
the instance, and two accesses have to compare equal. What such a function does is ``data_parallel``'s and
``composable.replicate``'s business; nobody else uses this room.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch

from dataparallel import _torch

__all__ = ["StandIns", "shows_forward_of_module"]

F = TypeVar("F", bound=Callable[..., Any])


class StandIns:
    """One function for each function that it stands for, as long as somebody holds it.

    So two bound methods that were made one after the other are equal while the first is held, as with any method.

    Args:
        make: makes the one from the other, and keeps that alive through ``__wrapped__`` or a closure.
    """

    def __init__(self, make: Callable[[Any], FunctionType]) -> None:
        self._make = make
        # Keyed by ids, which stay taken: each function keeps alive what it stands for, and its entry goes with it.
        self._made: weakref.WeakValueDictionary[int, FunctionType] = weakref.WeakValueDictionary()

    def of(self, function: Any) -> FunctionType:
        """What stands for ``function``."""
        return self._made.get(id(function)) or self._made.setdefault(id(function), self._make(function))


class _ShowsForwardOfModule:
    """A method of a wrapper: a plain function on the class; on an instance it has the signature of the module's."""

    def __init__(self, function: FunctionType) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._stand_ins = StandIns(self._showing)

    def __get__(self, wrapper: Any, cls: type | None = None) -> Any:
        if wrapper is None:
            return self._function
        if torch.compiler.is_compiling():  # nobody looks at what the compiler calls
            return functools.partial(self._function, wrapper)
        module = vars(wrapper).get("_modules", {}).get("module")
        shown = getattr(module, "forward", None)
        if isinstance(shown, MethodType):
            return MethodType(self._stand_ins.of(shown.__func__), wrapper)
        bound = MethodType(self._function, wrapper)
        if shown is None or (isinstance(shown, _torch.ScriptMethod) and not hasattr(shown, "__wrapped__")):
            return bound  # what has been traced has no signature to show
        return _shown_by(functools.partial(bound), shown)

    def _showing(self, shown: Any) -> FunctionType:
        function = self._function

        def forward(wrapper: Any, /, *inputs: Any, **kwargs: Any) -> Any:
            return function(wrapper, *inputs, **kwargs)

        functools.update_wrapper(forward, function)
        return _shown_by(cast(FunctionType, forward), shown)


def _shown_by(function: F, shown: Any) -> F:
    """``function`` with the signature of ``shown``, which is looked at when somebody asks."""
    function.__wrapped__ = shown  # type: ignore[attr-defined]
    # Written as strings they are looked up where ``shown`` is defined.
    function.__annotations__ = dict(getattr(shown, "__annotations__", {}))
    return function


def shows_forward_of_module(function: F) -> F:
    """Decorates a method of a class whose instances hold one module, ``self.module``."""
    return cast(F, _ShowsForwardOfModule(cast(FunctionType, function)))
