"""Which modules of a tree are compiled, and the functions that replicas call in place of the source's compiled code.

All replicas of modules that are alike share one function for each device. A function takes a replica and calls it. The
compiler keeps graphs with the code object of a function and looks through all of them at each call, so each function
has a code object of its own.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.compile_lock import compile_lock

log = logging.getLogger("dataparallel")

CALL = "_compiled_call_impl"
"""The attribute of a module that ``module.compile()`` sets."""

NAMES = ("backend", "mode", "dynamic", "fullgraph", "options")
"""What a dict may hold: arguments of ``torch.compile``."""


# ---- how a module is compiled ----------------------------------------------------------------------------------------


class CompiledCall:
    """Calls a module by a compiled function. It refers to the module weakly, because the module holds it.

    When the compiler traces a module around this one, it does not call this object, but looks into the module.

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
            setattr(self, torch_compile.DISABLED, True)

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

    ``None`` if it is not. ``others``, and what is raised: see `_functions`.
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


def call_inside(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a module of a replica, compiled if it is, without what has taken the place of that call."""
    call = compiled_call(module)
    return module._call_impl(*args, **kwargs) if call is None else call(*args, **kwargs)


def call_of(module: nn.Module, compiled: Compiled) -> CompiledCall:
    """A call of ``module`` itself by the compiled functions of its replicas. The caller keeps the module alive."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return CompiledCall(compiled.functions, module, None if first is None else first.device)


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
        with suppress(LookupError):  # it is compiled, and torch does not say how
            if compiled_here(module) is None:
                return cls(options)
        raise ValueError(
            f"this {type(module).__name__} is compiled already, and its replicas are compiled in the same way: "
            "leave compile= out, or wrap the module that is not compiled"
        )

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


def _nothing() -> None:
    """This function is compiled only to get a context."""


# ---- functions -------------------------------------------------------------------------------------------------------


def by_call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What is compiled for a module that ``torch.compile`` has wrapped."""
    return module(*args, **kwargs)


def by_call_impl(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What is compiled for a module whose own calls lead to compiled code: `module()` would lead here again."""
    return module._call_impl(*args, **kwargs)


_of_thread = threading.local()


@contextmanager
def none_compiled() -> Iterator[None]:
    """A block in which compiled code raises ``RuntimeError`` in this thread where it would have to be compiled anew."""
    _of_thread.may_not_compile = True
    try:
        yield
    finally:
        _of_thread.may_not_compile = False


class _LookAgain(Exception):
    """Raised where the compiler has found no graph, and another thread has made one that may fit."""


_LOOK_AGAIN_SECONDS = 0.002
_ADDED_SECONDS = 0.05
"""How long after it was made a graph is found at the latest: torch adds it a moment after the turn of its thread."""


class CompiledFunctions:
    """The functions of modules that are alike and were compiled alike, one for each device.

    Blocks of a model that are compiled one by one share them. So do the replicas of all wrappers of a module. They live
    as long as the source or a replica that calls them.

    ``key``: the structure of these modules, and `by_call` or `by_call_impl`. ``on``: the function of each device.
    """

    def __init__(self, key: tuple[Hashable, Callable[..., Any]], context: Any) -> None:
        self.key, self.number = key, next(_numbers)
        self.context = torch_compile.copy_of_context(context)  # not the one whose end is the end of the functions
        self.are_captured = False
        self.on: dict[torch.device | None, _CompiledFunction] = {}

    def call(self, device: torch.device | None, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = self.on.get(device) or self._make(device)
        return compile_lock.run_inside(function.call, module, args, kwargs)

    def _make(self, device: torch.device | None) -> _CompiledFunction:
        context = self.context
        if device is not None and device.type == "cuda" and torch_compile.uses_cuda_graphs(context):
            # The compiler's own graphs cannot follow several threads, nor parameters that move.
            context = torch_compile.without_cuda_graphs(context)
            if not self.are_captured:
                _say_that_they_run_without()
        with _lock:
            if device not in self.on:
                self.on[device] = _CompiledFunction(self, device, context)
            return self.on[device]


@cache
def _say_that_they_run_without() -> None:
    log.warning(
        "replicas that were compiled with CUDA graphs run without: their form has none. DataParallel and replicate "
        "have graphs=True"
    )


class _CompiledFunction:
    """Several threads may call it, and miss the same graph. The first one compiles it, alone. The others look again.

    That is possible only where the frame has not begun: in the function itself. A frame further inside is compiled
    again, once for each thread that has missed it.
    """

    def __init__(self, family: CompiledFunctions, device: torch.device | None, context: Any) -> None:
        self._family, self._device = weakref.ref(family), device
        # From the name the compiler remembers which sizes vary. Devices share that, other modules do not.
        original = cast(FunctionType, family.key[1])
        self._code = original.__code__.replace(co_name=f"{original.__name__}_{family.number}")
        function = FunctionType(self._code, original.__globals__, self._code.co_name)
        self._compiled = torch_compile.compile_within(context, function, self._compile)
        torch_compile.let_backwards_run_at_once()
        self._made_at = -math.inf  # when the last graph was made

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        while True:
            try:
                return self._compiled(module, *args, **kwargs)
            except _LookAgain:
                time.sleep(_LOOK_AGAIN_SECONDS)

    def _compile(self, code: CodeType, convert: Callable[[], Any]) -> Any:
        """Called by the compiler, inside, where none of the code's graphs fits."""
        if getattr(_of_thread, "may_not_compile", False):
            raise RuntimeError("none of its compiled code fits the call that is captured")
        return compile_lock.run_alone(self._convert, code, convert, time.monotonic())

    def _convert(self, code: CodeType, convert: Callable[[], Any], looked_at: float) -> Any:
        if code is self._code and looked_at < self._made_at + _ADDED_SECONDS:
            raise _LookAgain
        torch_compile.refuse_parameters_in_graphs()
        family, failed = self._family(), torch_compile.frames_that_failed()
        try:
            with torch_compile.compiling_for(1 if family is None else len(family.on)):
                result = convert()
        finally:
            _now.eager[self._device] += torch_compile.frames_that_failed() - failed
        if torch_compile.has_graph(result):
            _now.compilations[self._device] += 1
            if code is self._code:
                self._made_at = time.monotonic()
        return result


_numbers = itertools.count()
_of_contexts: weakref.WeakKeyDictionary[Any, dict[Any, CompiledFunctions]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _functions(
    module: nn.Module, body: Callable[..., Any], compiled: Any, others: Iterable[Compiled | None]
) -> CompiledFunctions:
    """They live as long as the context. ``others``: of modules of the tree, of which one that is alike shares its own.

    Raises ``LookupError`` if torch does not say how ``compiled`` was compiled.
    """
    context = torch_compile.compiler_context(compiled)
    if context is None:
        raise LookupError(f"{compiled!r} is not what torch.compile makes")
    with _lock:
        held = _of_contexts.setdefault(context, {})
        key = _structure(module), body
        if key not in held:
            same = (other.functions for other in others if other and other.functions and other.functions.key == key)
            alike = (each for each in same if torch_compile.are_contexts_alike(context, each.context))
            held[key] = next(alike, None) or CompiledFunctions(key, context)
        return held[key]


def _structure(module: nn.Module) -> Hashable:
    """Modules with one structure share graphs. Hooks are traced, and a later call does not look if they are these."""
    return (
        tuple((name, type(child), _hooks(child)) for name, child in module.named_modules()),
        tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in module.named_parameters()),
        tuple((name, tensor.shape, tensor.dtype) for name, tensor in module.named_buffers()),
    )


def _hooks(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """The hooks of a module, which all have numbers of their own, and copies of a module the same ones."""
    tables = [vars(module).get(name) or {} for name in _torch.OWN_HOOK_TABLES]
    return tuple((number, id(hook)) for table in tables for number, hook in table.items())


# ---- counts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameCounts:
    """How often frames of Python were compiled, and how often that failed, so that a frame runs as it is.

    A call without graph breaks is one frame. Each further part between two graph breaks is one more.

    Attributes:
        compilations: how many frames were compiled, for each device. ``None`` stands for replicas without tensors.
        eager: how many frames could not be compiled, for each device.
    """

    compilations: Counter[torch.device | None] = field(default_factory=Counter)
    eager: Counter[torch.device | None] = field(default_factory=Counter)

    def __sub__(self, earlier: FrameCounts) -> FrameCounts:
        """What has happened since ``earlier``."""
        return FrameCounts(self.compilations - earlier.compilations, self.eager - earlier.eager)

    @property
    def total(self) -> int:
        """Compilations on all devices."""
        return self.compilations.total()


_now = FrameCounts()  # written by the one thread that compiles


def counts() -> FrameCounts:
    """The counts of this process until now."""
    return FrameCounts(_now.compilations.copy(), _now.eager.copy())
