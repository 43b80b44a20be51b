"""What a replica has in place of compiled code of its source: an object that calls the function of its device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dataparallel import _torch
from dataparallel.compiled.functions import CompiledFunctions

__all__ = ["NOT_COMPILED", "CompiledCall"]


class _Reference(weakref.ref[Any]):
    """A weak reference of its own. torch and users share the plain one, so it would hide theirs where they count."""

    __slots__ = ()


class CompiledCall:
    """Calls a module by a compiled function.

    It refers to the module weakly, because the module holds it: a circle would keep replicas alive. While the compiler
    traces a module around this one it does not get here, but looks into the module.

    Args:
        functions: the functions of modules that are alike.
        module: the module, which runs while this is called.
        seen: makes of the module what the compiler is to see in its place; ``None``: the module itself.

    Attributes:
        device: that of all tensors of the replica; ``None`` if it has none.
    """

    def __init__(self, functions: CompiledFunctions, module: Any, seen: Callable[[Any], Any] | None = None) -> None:
        self._functions, self._module, self._seen = functions, _Reference(module), seen
        self.device: torch.device | None = None
        if functions.is_disabled:
            _torch.say_that_it_is_disabled(self)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        return self._functions.run(self.device, module if self._seen is None else self._seen(module), args, kwargs)

    # Between two graphs the compiler looks at every frame. This one, and those below it, are not for it.
    __call__ = _torch.not_traced(_call)


class _NotCompiled:
    """In the place of functions of a wrapper by ``torch.compile`` whose replicas are not compiled as a whole."""

    is_disabled = True

    def run(self, device: torch.device | None, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module."""
        return module(*args, **kwargs)

    def are_for(self, structure: Hashable, body: object, context: object) -> bool:
        """False: no module shares them."""
        return False


NOT_COMPILED: Any = _NotCompiled()
"""Functions that call the module as it is."""
