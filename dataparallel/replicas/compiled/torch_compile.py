"""How `torch.compile` is driven where its public functions do not reach: contexts, settings, what it has compiled.

``calls`` compiles replicas with it. Beside ``_torch`` this is the only file that spells private names of torch,
because they are attributes of objects that only the compiler has.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from dataparallel import _torch

OWN_OF_COMPILED = (
    "forward",
    "_forward",
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "get_compiler_config",
)
"""Attributes of a module that ``torch.compile`` has made, which lead to the code or methods of the original."""


def compiler_context(compiled: Any) -> Any:
    """Its backend and options. ``None`` if that torch keeps no context with it, or keeps it elsewhere."""
    context_class = _torch.of_compiler("context")
    if issubclass(type(compiled), _torch.of_compiler("module")):
        found = vars(compiled).get("dynamo_ctx")
    else:
        names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(compiled, "__closure__", None) or (), strict=False))
        found = cells["self"].cell_contents if "self" in cells else None
    return found if isinstance(found, context_class) else None


def copy_of_context(context: Any) -> Any:
    own = object.__new__(type(context))  # not by `copy.copy`: contexts have a `__reduce__` that leaves settings out
    vars(own).update(vars(context))
    return own


def without_cuda_graphs(context: Any) -> Any:
    """A context that compiles in the same way, except that nothing is recorded as CUDA graphs."""
    *others, backend = _callbacks(context.callback)
    settings: dict[str, Any] = {"dynamic": backend.dynamic, "fullgraph": context.fullgraph}
    options: dict[str, Any] = {}
    if getattr(backend, "compiler_name", None) == "cudagraphs":  # this backend does nothing else
        settings["backend"] = "aot_eager"
    else:
        options |= {**backend.config, "triton.cudagraphs": False}
    which_guards = getattr(getattr(context, "_hooks", None), "guard_filter_fn", None)
    if which_guards is not None:
        options["guard_filter_fn"] = which_guards
    limits = {getattr(callback, "_recompile_limit", None) for callback in others} - {None}
    if limits:  # torch 2.11 has none
        settings["recompile_limit"] = limits.pop()
    return compiler_context(torch.compile(options=options, **settings)(is_disabled))


MARK_OF_COMPILER = "_dynamo_"
"""The beginning of the names of what the compiler sets on tensors, which no forward reads."""

DISABLED = "_torchdynamo_disable"
"""Attribute of what a module calls: the compiler does not look into the module."""


def is_disabled(context: Any) -> bool:
    """True for a context of ``torch.compiler.disable``, which keeps the compiler away."""
    return context.callback is None


def are_contexts_alike(one: Any, other: Any) -> bool:
    """True if two contexts compile in the same way: backend, options, dynamic shapes, whole graphs."""
    names = ("fullgraph", "error_on_graph_break", "export", "_dynamic", "_hooks", "_shapes_spec", "_package")
    return bool(
        _callbacks(one.callback)[-1] == _callbacks(other.callback)[-1]
        and all(getattr(one, name, None) == getattr(other, name, None) for name in names)
    )


def _callbacks(callback: Any) -> list[Any]:
    """What the compiler calls, each inside the one before. The last one is the backend."""
    found = [callback]
    while hasattr(found[-1], "_torchdynamo_orig_backend"):
        found.append(found[-1]._torchdynamo_orig_backend)
    return found


class _Around:
    """A compiler's callback with a function around it. torch finds the backend through it as before."""

    def __init__(self, callback: Any, hooks: Sequence[Callable[[], Callable[[], object]]], around: Any) -> None:
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend
        self._callback, self._hooks, self._around = callback, hooks, around

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        def convert() -> Any:
            # The context's settings, `dynamic` for example, are settings of the process. Only tracing reads them.
            ends = [enter() for enter in self._hooks]
            try:
                return self._callback(frame, cache_entry, frame_state)
            finally:
                for end in ends:
                    end()

        return self._around(frame.f_code, convert)


def compile_within(context: Any, function: FunctionType, around: Callable[[CodeType, Callable[[], Any]], Any]) -> Any:
    """``function``, compiled as ``context`` says, with graphs of its own.

    ``around`` is called where a frame has no graph that fits, with the frame's code and a function without arguments
    that compiles it. It returns what this returns, and the graph is added to the code after that. If it raises, the
    call of the compiled function raises.
    """
    own = copy_of_context(context)
    if callable(own.callback):
        own.callback = _Around(context.callback, context.enter_exit_hooks, around)
        own.enter_exit_hooks = []
        # torch keeps the numbers of these features for the process, and replicas call at the same time.
        own._isolate_recompiles_id, own.fullgraph = -1, False
    return own(function)


def let_backwards_run_at_once() -> None:
    """Lets compiled backwards of one pass run in several threads of the engine.

    torch 2.13 runs each of them in the context of the thread that has called ``backward``, and Python enters a context
    once at a time: "cannot enter context: ... is already entered". From here on each runs in a copy of that context.
    This replaces the name ``contextvars`` in one module of torch. torch 2.11 has no such context, 2.15 makes a copy.
    """
    module = sys.modules["torch.autograd.graph"]
    original = getattr(module, "contextvars", None)
    if isinstance(original, ModuleType):
        module.contextvars = SimpleNamespace(  # type: ignore[attr-defined]
            copy_context=lambda: _ContextForEach(original.copy_context())
        )


class _ContextForEach:
    """A context that several threads may run functions in at the same time: each runs in a copy."""

    def __init__(self, context: contextvars.Context) -> None:
        self.copy = context.copy  # torch 2.15 makes a copy itself

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self.copy().run(function, *args, **kwargs)


def has_graph(result: Any) -> bool:
    """True if what a compiler's callback has returned is code with graphs; otherwise the frame runs as it is."""
    return getattr(result, "guarded_code", None) is not None


def frames_that_failed() -> int:
    """How many frames this process could not compile so far, and ran as they are."""
    frames = _torch.of_compiler("counters")["frames"]
    return int(frames["total"] - frames["ok"])


def uses_cuda_graphs(context: Any) -> bool:
    backend = _callbacks(context.callback)[-1]
    if getattr(backend, "compiler_name", None) == "cudagraphs":
        return True
    own = getattr(backend, "config", None)
    if not isinstance(own, dict):  # Inductor's have one
        return False
    return bool(own.get("triton.cudagraphs", _torch.of_compiler("inductor").triton.cudagraphs))


def refuse_parameters_in_graphs() -> None:
    if _torch.of_compiler("inductor").freezing:
        raise RuntimeError(
            "replicas cannot be compiled with torch._inductor.config.freezing = True: graphs would hold the parameters "
            "of one replica. Set it to False"
        )


@contextmanager
def compiling_for(devices: int) -> Iterator[None]:
    """Settings of the compiler for functions of so many devices. They hold for the process until the end.

    The backward is compiled together with the forward. Otherwise it would be compiled when it first runs, in a thread
    of the engine. Frames that are entered between two graphs may have as many graphs on each device as on one.
    """
    config = _torch.of_compiler("config")
    limits = {name: devices * getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with config.patch(**limits), _torch.of_compiler("functorch").patch(force_non_lazy_backward_lowering=True):
        yield


def is_compiled_backward(node: Any) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def compiled_backwards_keep_graphs() -> AbstractContextManager[Any]:
    """Lets compiled code that may write to what its forward has saved run in a backward with ``retain_graph=True``.

    This is for captures, whose forward is launched anew before each backward. torch 2.12 and later keep the setting in
    a context variable, and hand the context over to the threads of the engine.
    """
    if not _torch.is_compiler_loaded():
        return nullcontext()
    settings: AbstractContextManager[Any] = _torch.of_compiler("functorch").patch(donated_buffer=False)
    return settings
