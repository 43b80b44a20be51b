"""`StandIns` makes functions that are called in place of a module's methods and show the methods' signatures.

transformers, accelerate and Lightning read ``inspect.signature(model.forward)``, compare bound methods and look for
their ``__func__``. So a stand-in is a function on the class and a bound method on the instance.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch

from dataparallel import _torch

F = TypeVar("F", bound=Callable[..., Any])


class StandIns:
    """Makes one stand-in for each function, and gives the same one while somebody holds it.

    So two bound methods that were made one after the other are equal while the first is held, as with any method.

    Args:
        make: makes a stand-in from a function. The stand-in keeps it alive through ``__wrapped__`` or a closure.
        is_traced: False if ``torch.compile`` finds nothing to compile in stand-ins and below. A compiled function then
            calls them between its graphs, and the compiler would look through each function on the way to the stages.
    """

    def __init__(self, make: Callable[[Any], FunctionType], is_traced: bool = True) -> None:
        self._make, self._is_traced = make, is_traced
        # The keys are ids of functions. A stand-in keeps its function alive, so nothing else gets the id meanwhile.
        self._made: weakref.WeakValueDictionary[int, FunctionType] = weakref.WeakValueDictionary()
        self._last: FunctionType | None = None  # held, as a model is called again and again

    def of(self, function: Any) -> FunctionType:
        """Returns the stand-in for ``function``. Of several threads that ask first at once, each may get its own."""
        made = self._made.get(id(function)) or self._made.setdefault(id(function), self._new(function))
        if getattr(function, "__closure__", None) is None:  # else it would keep other objects alive
            self._last = made
        return made

    def _new(self, function: Any) -> FunctionType:
        made = self._make(function)
        return made if self._is_traced else left_alone(made)


def left_alone(function: F) -> F:
    """Marks this function with `_torch.leave_alone`, but not other functions that the same ``def`` has made.

    The mark is on the code, which they share. So all functions of the ``def`` that get the mark share a copy of it.
    """
    code = cast(FunctionType, function).__code__
    marked = _marked.get(code)
    if marked is None:
        marked = _marked.setdefault(code, code.replace())
    cast(FunctionType, function).__code__ = marked
    return _torch.leave_alone(function)


_marked: dict[CodeType, CodeType] = {}
"""For each code that `left_alone` has seen, its copy with the mark. There is one for each ``def``, so there are few."""


class _ShowsForwardOfModule:
    """A method of a wrapper. On the class it is a plain function, on an instance it shows the module's signature."""

    def __init__(self, function: FunctionType) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._stand_ins = {is_traced: StandIns(self._make_stand_in, is_traced) for is_traced in (True, False)}
        self._left_alone = left_alone(self._make_copy())

    @_torch.leave_alone
    def __get__(self, wrapper: Any, cls: type | None = None) -> Any:
        if wrapper is None:
            return self._function
        if torch.compiler.is_dynamo_compiling():  # the compiler does not read the signature
            return functools.partial(self._function, wrapper)
        module = vars(wrapper).get("_modules", {}).get("module")
        original = getattr(module, "forward", None)
        is_traced = not wrapper.device_ids
        if isinstance(original, MethodType):
            return MethodType(self._stand_ins[is_traced].of(original.__func__), wrapper)
        bound = MethodType(self._function if is_traced else self._left_alone, wrapper)
        if original is None or (isinstance(original, _torch.ScriptMethod) and not hasattr(original, "__wrapped__")):
            return bound  # what `torch.jit.trace` makes has no signature
        return _give_signature(functools.partial(bound), original)

    def _make_stand_in(self, original: Any) -> FunctionType:
        return _give_signature(self._make_copy(), original)

    def _make_copy(self) -> FunctionType:
        function = self._function

        def forward(wrapper: Any, /, *inputs: Any, **kwargs: Any) -> Any:
            return function(wrapper, *inputs, **kwargs)

        functools.update_wrapper(forward, function)
        return cast(FunctionType, forward)


def _give_signature(function: F, original: Any) -> F:
    """Gives ``function`` the signature of ``original``, which Python reads when somebody asks for it."""
    function.__wrapped__ = original  # type: ignore[attr-defined]
    # Python looks up annotations that are strings where ``original`` is defined.
    function.__annotations__ = dict(getattr(original, "__annotations__", {}))
    return function


def shows_forward_of_module(function: F) -> F:
    """Decorates a method of a class whose instances hold a module, ``self.module``, and slots, ``self.device_ids``."""
    return cast(F, _ShowsForwardOfModule(cast(FunctionType, function)))
