"""Stand-ins: functions that are called in place of a module's methods and show their signature.

transformers, accelerate and Lightning read ``inspect.signature(model.forward)``, compare bound methods and look for
their ``__func__``. So a stand-in is a function on the class and a bound method on the instance.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch

from dataparallel import _torch

F = TypeVar("F", bound=Callable[..., Any])


class StandIns:
    """One stand-in for each function, as long as somebody holds the stand-in.

    So two bound methods that were made one after the other are equal while the first is held, as with any method.

    Args:
        make: makes the stand-in from the function, which it keeps alive through ``__wrapped__`` or a closure.
        traced: false if ``torch.compile`` has nothing to compile in stand-ins and what they call. A compiled function
            calls them between its graphs, and the compiler would look through each function on the way to the stages.
    """

    def __init__(self, make: Callable[[Any], FunctionType], traced: bool = True) -> None:
        self._make, self._traced = make, traced
        # Keyed by ids, which stay taken: a stand-in keeps its function alive, and the entry goes with the stand-in.
        self._made: weakref.WeakValueDictionary[int, FunctionType] = weakref.WeakValueDictionary()

    def of(self, function: Any) -> FunctionType:
        """The stand-in for ``function``."""
        return self._made.get(id(function)) or self._made.setdefault(id(function), self._new(function))

    def _new(self, function: Any) -> FunctionType:
        made = self._make(function)
        return made if self._traced else left_alone(made)


def left_alone(function: F) -> F:
    """The function, one of several that the same lines have made, which `_torch.leave_alone` is to keep apart."""
    cast(FunctionType, function).__code__ = cast(FunctionType, function).__code__.replace()  # the mark is on the code
    return _torch.leave_alone(function)


class _ShowsForwardOfModule:
    """A method of a wrapper. On the class it is a plain function, on an instance it shows the module's signature."""

    def __init__(self, function: FunctionType) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._stand_ins = {traced: StandIns(self._showing, traced) for traced in (True, False)}
        self._left_alone = left_alone(self._calling())

    @_torch.leave_alone
    def __get__(self, wrapper: Any, cls: type | None = None) -> Any:
        if wrapper is None:
            return self._function
        if torch.compiler.is_dynamo_compiling():  # the compiler does not read the signature
            return functools.partial(self._function, wrapper)
        module = vars(wrapper).get("_modules", {}).get("module")
        shown = getattr(module, "forward", None)
        traced = not wrapper.device_ids
        if isinstance(shown, MethodType):
            return MethodType(self._stand_ins[traced].of(shown.__func__), wrapper)
        bound = MethodType(self._function if traced else self._left_alone, wrapper)
        if shown is None or (isinstance(shown, _torch.ScriptMethod) and not hasattr(shown, "__wrapped__")):
            return bound  # a traced method has no signature
        return _shown_by(functools.partial(bound), shown)

    def _showing(self, shown: Any) -> FunctionType:
        return _shown_by(self._calling(), shown)

    def _calling(self) -> FunctionType:
        function = self._function

        def forward(wrapper: Any, /, *inputs: Any, **kwargs: Any) -> Any:
            return function(wrapper, *inputs, **kwargs)

        functools.update_wrapper(forward, function)
        return cast(FunctionType, forward)


def _shown_by(function: F, shown: Any) -> F:
    """``function`` with the signature of ``shown``, which is read when somebody asks for it."""
    function.__wrapped__ = shown  # type: ignore[attr-defined]
    # Annotations that are strings are looked up where ``shown`` is defined.
    function.__annotations__ = dict(getattr(shown, "__annotations__", {}))
    return function


def shows_forward_of_module(function: F) -> F:
    """Decorates a method of a class whose instances hold a module, ``self.module``, and slots, ``self.device_ids``."""
    return cast(F, _ShowsForwardOfModule(cast(FunctionType, function)))
