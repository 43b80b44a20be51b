"""Which modules of a tree are compiled, and what their replicas call instead. ``modules.plan`` asks for each module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from dataparallel import _torch
from dataparallel.compiled.calls import CompiledCall
from dataparallel.compiled.functions import CompiledFunctions, by_call, by_call_impl, functions_for

__all__ = ["CALL", "Compiled", "call_of", "compiled_here", "compiled_in_place"]

CALL = "_compiled_call_impl"
"""The attribute of a module that ``module.compile()`` sets."""


class Compiled(NamedTuple):
    """How replicas of a module call compiled code.

    Attributes:
        functions: what they call.
        attribute: where they have a `CompiledCall`.
        child: the name of the child that is called; ``None`` if it is the module itself.
        left_out: attributes of the source that a replica has no copy of, because they lead to the source.
    """

    functions: CompiledFunctions
    attribute: str
    child: str | None
    left_out: tuple[str, ...]


def compiled_here(module: nn.Module, others: Iterable[CompiledFunctions] = ()) -> Compiled | None:
    """How ``module`` is compiled: by ``module.compile()``, or because it is what ``torch.compile(...)`` has returned.

    ``None`` if it is not. ``others``: functions of other modules of its tree, which it may share.

    Raises:
        LookupError: it is compiled, and replicas could not be compiled in the same way.
    """
    if not _torch.is_compiler_loaded():
        return None
    call = vars(module).get(CALL)  # managed modules hide it from their own calls
    if call is not None:
        return compiled_in_place(module, call, others)
    original = _torch.compiled_original(module)
    if original is None:
        return None
    functions = _functions(original, by_call, module, others)
    return Compiled(functions, "forward", _torch.ORIGINAL_OF_COMPILED, _torch.OWN_OF_COMPILED)


def compiled_in_place(module: nn.Module, call: Any, others: Iterable[CompiledFunctions] = ()) -> Compiled:
    """How a module is compiled whose own calls lead to ``call``, which ``torch.compile`` has made.

    Raises:
        LookupError: see `compiled_here`.
    """
    return Compiled(_functions(module, by_call_impl, call, others), CALL, None, (CALL,))


def call_of(module: nn.Module, compiled: Compiled) -> CompiledCall:
    """What calls ``module`` itself as replicas of it are called. The caller keeps the module alive."""
    call = CompiledCall(compiled.functions, module)
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    call.device = None if first is None else first.device
    return call


def _functions(
    module: nn.Module, body: Callable[..., Any], compiled: Any, others: Iterable[CompiledFunctions]
) -> CompiledFunctions:
    context = _torch.compiler_context(compiled)
    if context is None:
        raise LookupError(f"{compiled!r} is not what torch.compile makes")
    return functions_for(module, body, context, others)
