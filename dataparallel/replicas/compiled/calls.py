"""Which modules of a tree are compiled, and what their replicas call in place of the source's compiled code."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.functions import CompiledFunctions, by_call, by_call_impl, functions_for

CALL = "_compiled_call_impl"
"""The attribute of a module that ``module.compile()`` sets."""

NAMES = ("backend", "mode", "dynamic", "fullgraph", "options")
"""What a dict may hold: arguments of ``torch.compile``."""


class CompiledCall:
    """Calls a module by a compiled function.

    It refers to the module weakly, because the module holds it: a cycle would keep replicas alive. When the compiler
    traces a module around this one, it does not call this object, but looks into the module.

    ``functions`` is ``None`` if the module runs as it is. ``seen`` returns what the compiler sees in place of the
    module. ``device`` is that of all tensors of the replica, ``None`` if it has none.
    """

    def __init__(
        self,
        functions: CompiledFunctions | None,
        module: Any,
        device: torch.device | None,
        seen: Callable[[Any], Any] | None = None,
    ) -> None:
        self.functions, self._module, self._device, self._seen = functions, weakref.ref(module), device, seen
        if functions is None or torch_compile.is_disabled(functions.context):
            torch_compile.say_that_it_is_disabled(self)

    @property
    def module(self) -> Any:
        return self._module()

    def of(self, module: nn.Module) -> CompiledCall:
        return CompiledCall(self.functions, module, self._device, self._seen)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if self.functions is None:
            return module(*args, **kwargs)
        return self.functions.call(self._device, module if self._seen is None else self._seen(module), args, kwargs)

    # Between two graphs the compiler looks at every frame. This one, and those below it, are not for it.
    __call__ = _torch.not_traced(_call)


class Compiled(NamedTuple):
    """How replicas of a module call compiled code.

    Attributes:
        functions: the compiled functions that replicas call; ``None``: replicas call the child uncompiled.
        attribute: where they have a `CompiledCall`.
        child: the name of the child that is called; ``None`` if it is the module itself.
        left_out: attributes that are not copied to replicas, because they lead to the source.
    """

    functions: CompiledFunctions | None
    attribute: str
    child: str | None
    left_out: tuple[str, ...]


def compiled_here(module: nn.Module, others: Iterable[Compiled | None] = ()) -> Compiled | None:
    """How ``module`` is compiled: by ``module.compile()``, or because it is what ``torch.compile(...)`` has returned.

    ``None`` if it is not. ``others``: how other modules of its tree are, whose functions it may share. Raises
    ``LookupError`` if replicas could not be compiled in the same way.
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
    return Compiled(functions, "forward", _torch.ORIGINAL_OF_COMPILED, torch_compile.OWN_OF_COMPILED)


def compiled_in_place(module: nn.Module, call: Any, others: Iterable[Compiled | None] = ()) -> Compiled:
    """How a module is compiled whose own calls lead to ``call``, which ``torch.compile`` has made."""
    return Compiled(_functions(module, by_call_impl, call, others), CALL, None, (CALL,))


def compiled_call(module: nn.Module) -> CompiledCall | None:
    """The compiled call of a module of a replica, perhaps as ``compiled`` of what has taken its place."""
    found = vars(module).get(CALL)
    call = getattr(found, "compiled", found)
    return call if isinstance(call, CompiledCall) else None


def compiled_calls(module: nn.Module) -> dict[str, CompiledCall]:
    forward = vars(module).get("forward")  # what `torch.compile` has returned has one
    found = {CALL: compiled_call(module), "forward": forward if isinstance(forward, CompiledCall) else None}
    return {name: call for name, call in found.items() if call is not None}


def call_inside(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a module of a replica, compiled if it is, without what has taken the place of that call."""
    call = compiled_call(module)
    return module._call_impl(*args, **kwargs) if call is None else call(*args, **kwargs)


def call_of(module: nn.Module, compiled: Compiled) -> CompiledCall:
    """A call of ``module`` itself by the compiled functions of its replicas. The caller keeps the module alive."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return CompiledCall(compiled.functions, module, None if first is None else first.device)


def _functions(
    module: nn.Module, body: Callable[..., Any], compiled: Any, others: Iterable[Compiled | None]
) -> CompiledFunctions:
    context = torch_compile.compiler_context(compiled)
    if context is None:
        raise LookupError(f"{compiled!r} is not what torch.compile makes")
    return functions_for(module, body, context, [other.functions for other in others if other and other.functions])


class CompileArgument:
    """How a wrapper compiles its replicas. A copy of it, and an unpickled one, compiles anew."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = dict(options)
        # It holds the context, and the functions live as long as the context.
        self._call = torch.compile(_nothing, **self.options)

    @classmethod
    def checked(cls, module: nn.Module, compile: Any) -> CompileArgument | None:
        if compile is None or compile is False:
            return None
        options = {} if compile is True else compile
        unknown = [name for name in options if name not in NAMES]
        if unknown:
            raise TypeError(f"compile={compile!r}: {unknown[0]!r} is none of {', '.join(NAMES)}")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("compile= is for Python modules: torch.compile takes no ScriptModule")
        if _is_compiled(module):
            raise ValueError(
                f"this {type(module).__name__} is compiled already, and its replicas are compiled in the same way: "
                "leave compile= out, or wrap the module that is not compiled"
            )
        return cls(options)

    def __reduce__(self) -> tuple[type[CompileArgument], tuple[dict[str, Any]]]:
        return CompileArgument, (self.options,)

    def of(self, module: nn.Module, others: Iterable[Compiled | None] = ()) -> Compiled | None:
        """``None`` if the compiler is switched off. ``others``: of modules in its tree, which may share functions."""
        return None if self._call is _nothing else compiled_in_place(module, self._call, others)


def use_cuda_graphs(modules: Iterable[nn.Module], argument: CompileArgument | None) -> bool:
    """True if a module of these trees, or a wrapper with this argument, is compiled with CUDA graphs."""
    if not _torch.is_compiler_loaded():
        return False
    compiled = [vars(child).get(CALL) or child for module in modules for child in module.modules()]
    if argument is not None:
        compiled.append(argument._call)
    contexts = map(torch_compile.compiler_context, compiled)
    return any(context is not None and torch_compile.uses_cuda_graphs(context) for context in contexts)


def _is_compiled(module: nn.Module) -> bool:
    try:
        return compiled_here(module) is not None
    except LookupError:
        return True


def _nothing() -> None:
    """This function is compiled only to get a context."""
