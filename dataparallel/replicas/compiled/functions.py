"""The compiled functions that replicas call: one for each device, shared by all replicas of modules that are alike.

A function here takes a replica and calls it. The compiler keeps graphs with the code object of a function and looks
through all of them at each call, so each function has a code object of its own.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.replicas.compiled import torch_compile
from dataparallel.replicas.compiled.compile_lock import compile_lock

log = logging.getLogger("dataparallel")


def by_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What is compiled for a module that ``torch.compile`` has wrapped."""
    return module(*args, **kwargs)


def by_call_impl(module: Any, *args: Any, **kwargs: Any) -> Any:
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

    Modules of one tree that have the same structure and were compiled alike share them, as the blocks of a model do
    that are compiled one by one. So do the replicas of all wrappers of a module. They live as long as the source or a
    replica that calls them.

    ``key``: the structure of these modules, and `by_call` or `by_call_impl`. ``on``: the function of each device.
    """

    def __init__(self, key: tuple[Hashable, Callable[..., Any]], context: Any) -> None:
        self.key, self.number = key, next(_numbers)
        self.context = torch_compile.copy_of_context(context)  # not the one whose end is the end of the functions
        self.are_captured = False
        self._lock = threading.Lock()
        self.on: dict[torch.device | None, _CompiledFunction] = {}

    def call(self, device: torch.device | None, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module, all of whose tensors are on ``device``, by the compiled function of this device."""
        function = self.on.get(device) or self._make(device)
        return compile_lock.run_inside(function.call, module, args, kwargs)

    def _make(self, device: torch.device | None) -> _CompiledFunction:
        context = self.context
        if device is not None and device.type == "cuda" and torch_compile.uses_cuda_graphs(context):
            # The compiler's own graphs cannot follow several threads, nor parameters that move.
            context = torch_compile.without_cuda_graphs(context)
            if not self.are_captured:
                _say_that_they_run_without()
        with self._lock:
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
        family, failed, is_compiled = self._family(), torch_compile.frames_that_failed(), False
        try:
            with torch_compile.compiling_for(1 if family is None else len(family.on)):
                result = convert()
            is_compiled = torch_compile.has_graph(result)
            return result
        finally:
            _note(self._device, int(is_compiled), torch_compile.frames_that_failed() - failed)
            if code is self._code and is_compiled:
                self._made_at = time.monotonic()


_numbers = itertools.count()
_of_contexts: weakref.WeakKeyDictionary[Any, dict[tuple[Hashable, Callable[..., Any]], CompiledFunctions]]
_of_contexts = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def functions_for(
    module: nn.Module, body: Callable[..., Any], context: Any, others: Iterable[CompiledFunctions]
) -> CompiledFunctions:
    """They live as long as the context. ``others``: those of modules of the tree, which one that is alike shares."""
    with _lock:
        held = _of_contexts.setdefault(context, {})
        key = _structure(module), body
        if key not in held:
            same = (functions for functions in others if functions.key == key)
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


_counts_lock = threading.Lock()
_now = FrameCounts()


def counts() -> FrameCounts:
    """The counts of this process until now."""
    with _counts_lock:
        return FrameCounts(_now.compilations.copy(), _now.eager.copy())


def _note(device: torch.device | None, compilations: int, eager: int) -> None:
    with _counts_lock:
        _now.compilations[device] += compilations
        _now.eager[device] += eager
