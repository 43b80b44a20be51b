"""Every private name of torch that the library uses: what for, and what happens in a torch that lacks it.

torch may rename these without notice, so no other room spells one out (``testing`` aside, whose simulated devices are a
backend of torch's own kind). Each name is looked up once, at import (one of the
compiler's when it is first needed). Where torch lacks it, either there is a fallback
(its ``without`` says which), or calls that need the name raise ``RuntimeError`` with a sentence; importing the library
works all the same. All names exist in torch 2.11, 2.13 and 2.15, whatever the build, unless an entry says otherwise.

Any room may call this one. It knows torch and nothing of the library.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

__all__ = ["HOOK_FLAGS", "HOOK_TABLES", "NAMES", "OWN_HOOK_TABLES", "REGISTRIES", "TRIED", "PrivateName"]

F = TypeVar("F", bound=Callable[..., Any])

TRIED = ("2.11", "2.13", "2.15")
"""Releases of torch in which all names have been found."""


@dataclass(frozen=True)
class PrivateName:
    """One private name of torch.

    Attributes:
        path: where torch has it.
        purpose: what the library needs it for, to complete "which dataparallel needs to ...".
        without: what happens where torch lacks it; empty: calls that need it raise.
        value: what was found, or what stands in for it.
    """

    path: str
    purpose: str
    without: str
    value: Any


NAMES: list[PrivateName] = []
"""All of them, in the order of this file."""


def _private(path: str, purpose: str, instead: Any = None, without: str = "") -> Any:
    """What torch has at ``path``; else ``instead``, whose effect ``without`` describes; else what raises a sentence."""
    try:
        value = pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        value = _Missing(path, purpose) if instead is None else instead
    NAMES.append(PrivateName(path, purpose, without, value))
    return value


def _attribute(path: str, purpose: str) -> Callable[[Any], Any]:
    """Reads the attribute at the end of ``path`` from an instance."""
    value = _private(path, purpose)
    return value if isinstance(value, _Missing) else attrgetter(path.rpartition(".")[2])


class _Missing:
    """Stands for what torch lacks: a call, or a look at an attribute, raises a sentence."""

    def __init__(self, path: str, purpose: str) -> None:
        self._sentence = (
            f"torch {torch.__version__} has no {path}, which dataparallel needs to {purpose}. It has been tried with "
            f"torch {', '.join(TRIED)}: install one of these, or a release of dataparallel that knows your torch"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._sentence)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by Python
            raise AttributeError(name)
        raise RuntimeError(self._sentence)


# ---- the autograd engine ---------------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = _private(
    "torch._C._current_graph_task_id", "tell backward passes that run at the same time from each other"
)
will_engine_execute_node: Callable[[Any], bool] = _private(
    "torch._C._will_engine_execute_node", "ask whether the running backward pass reaches a parameter"
)
queue_callback: Callable[[Callable[[], object]], None] = _private(
    "torch.autograd.Variable._execution_engine.queue_callback", "do something when a backward pass ends"
)
rebuild_engine: Callable[[], object] = _private(
    "torch.autograd.Variable._execution_engine.is_checkpoint_valid",
    "have a forked child rebuild torch's autograd engine before several threads ask for it at once",
    lambda: None,
    "two workers of a forked child may rebuild the engine at the same time, which can crash it",
)
set_sequence_nr: Callable[[Any, int], None] = _private(
    "torch._C._FunctionBase._set_sequence_nr",
    "say which of several nodes that are ready backward runs first, so that sums begin while it still computes",
    lambda node, number: None,
    "gradients are summed when backward has computed all of them",
)

# ---- tensors and storages --------------------------------------------------------------------------------------------

version_of: Callable[[Tensor], int] = _attribute(
    "torch.Tensor._version", "see that a tensor was changed in place; tensors made in inference mode have no version"
)
use_count: Callable[[Tensor], int] = _private("torch.Tensor._use_count", "count who holds a tensor outside of Python")
storage_address: Callable[[Any], int] = _attribute("torch.UntypedStorage._cdata", "tell storages from each other")
storage_use_count: Callable[[int], int] = _private(
    "torch._C._storage_Use_Count", "count who holds the storage with this address"
)
hooks_of: Callable[[Tensor], Any] = _attribute("torch.Tensor._backward_hooks", "see hooks on a tensor")
hooks_after_accumulation_of: Callable[[Tensor], Any] = _attribute(
    "torch.Tensor._post_accumulate_grad_hooks", "see hooks on a parameter"
)
_indices = _private("torch.Tensor._indices", "reach the memory of a sparse tensor that is not coalesced")
_values = _private("torch.Tensor._values", "reach the memory of a sparse tensor that is not coalesced")
flatten_dense_tensors: Callable[[list[Tensor]], Tensor] = _private(
    "torch._utils._flatten_dense_tensors",
    "flatten many tensors by one operator",
    lambda tensors: torch.cat([tensor.contiguous().view(-1) for tensor in tensors]),
    "a view is made of each tensor first, which takes longer",
)
foreach_add: Callable[..., Sequence[Tensor]] = _private("torch._foreach_add", "add lists of tensors")
foreach_add_: Callable[..., None] = _private("torch._foreach_add_", "add a list of tensors to another one in place")
_DispatchKeySet = _private("torch._C.DispatchKeySet", "name the dispatch key that tracks views")
_DispatchKey = _private("torch._C.DispatchKey", "name the dispatch key that tracks views")
_ExcludeDispatchKeyGuard = _private(
    "torch._C._ExcludeDispatchKeyGuard", "make tensors that share memory and are no views to autograd"
)


def sparse_memory(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not."""
    return _indices(tensor), _values(tensor)


def without_view_tracking() -> AbstractContextManager[Any]:
    """Inside, tensors that share memory are no views to autograd, and have version counters of their own."""
    guard: AbstractContextManager[Any] = _ExcludeDispatchKeyGuard(_DispatchKeySet(_DispatchKey.ADInplaceOrView))
    return guard


# ---- what a thread has set -------------------------------------------------------------------------------------------

is_fwd_grad_enabled: Callable[[], bool] = _private("torch._C._is_fwd_grad_enabled", "carry forward-mode gradients")
set_fwd_grad_enabled: Callable[[bool], None] = _private(
    "torch._C._set_fwd_grad_enabled", "carry forward-mode gradients"
)
is_multithreading_enabled: Callable[[], bool] = _private(
    "torch._C._is_multithreading_enabled", "carry whether backward uses several threads"
)
set_multithreading_enabled: Callable[[bool], None] = _private(
    "torch._C._set_multithreading_enabled", "carry whether backward uses several threads"
)
is_view_replay_enabled: Callable[[], bool] = _private("torch._C._is_view_replay_enabled", "carry view replay")
set_view_replay_enabled: Callable[[bool], None] = _private("torch._C._set_view_replay_enabled", "carry view replay")
is_any_autocast_enabled: Callable[[], bool] = _private(
    "torch._C._is_any_autocast_enabled", "see whether autocast is on for any device"
)
autocast_device_types: Callable[[], list[str]] = _private(
    "torch._C._autocast_supported_devices", "carry autocast for every type of device"
)
is_torch_function_all_disabled: Callable[[], bool] = _private(
    "torch._C._is_torch_function_all_disabled", "carry whether __torch_function__ is called"
)
is_torch_function_enabled: Callable[[], bool] = _private(
    "torch._C._is_torch_function_enabled", "carry whether __torch_function__ is called"
)
DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = _private(
    "torch._C.DisableTorchFunction", "carry that __torch_function__ is not called"
)
DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[Any]] = _private(
    "torch._C.DisableTorchFunctionSubclass", "carry that __torch_function__ is not called"
)
function_modes: Callable[[], list[Any]] = _private(
    "torch.overrides._get_current_function_mode_stack", "carry torch function modes"
)
push_function_mode: Callable[[Any], None] = _private("torch.overrides._push_mode", "carry torch function modes")
pop_function_mode: Callable[[], Any] = _private("torch.overrides._pop_mode", "carry torch function modes")
dispatch_modes: Callable[[], list[Any]] = _private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "carry torch dispatch modes"
)
_push_dispatch_mode = _private("torch.utils._python_dispatch._push_mode", "carry torch dispatch modes")
_pop_dispatch_mode = _private("torch.utils._python_dispatch._pop_mode", "carry torch dispatch modes")
top_saved_tensors_hooks: Callable[[bool], Any] = _private(
    "torch._C._autograd._top_saved_tensors_default_hooks", "carry saved-tensor hooks"
)
push_saved_tensors_hooks: Callable[..., None] = _private(
    "torch._C._autograd._push_saved_tensors_default_hooks", "carry saved-tensor hooks"
)
pop_saved_tensors_hooks: Callable[[], object] = _private(
    "torch._C._autograd._pop_saved_tensors_default_hooks", "carry saved-tensor hooks"
)
why_saved_tensors_hooks_are_disabled: Callable[[], str | None] = _private(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", "carry that saved-tensor hooks are disabled"
)
disable_saved_tensors_hooks: Callable[[str], None] = _private(
    "torch._C._autograd._saved_tensors_hooks_disable", "carry that saved-tensor hooks are disabled"
)
enable_saved_tensors_hooks: Callable[[], None] = _private(
    "torch._C._autograd._saved_tensors_hooks_enable", "carry that saved-tensor hooks are disabled"
)
DeviceContext: Callable[[torch.device], Any] = _private(
    "torch.utils._device.DeviceContext", "translate the default device to a slot's"
)
_GLOBAL_DEVICE_CONTEXT = _private(
    "torch._GLOBAL_DEVICE_CONTEXT",
    "see what torch.set_default_device has set in this thread",
    SimpleNamespace(),
    "a default device that a replica's forward sets stays set in its thread",
)
_functorch_interpreter: Callable[[], Any] = _private(
    "torch._C._functorch.peek_interpreter_stack", "refuse to run replicas inside a torch.func transform"
)


def push_dispatch_modes(modes: Iterable[Any]) -> Callable[[], None]:
    """Enters dispatch modes, outermost first; the result leaves them."""
    entered = [*modes]
    for mode in entered:
        _push_dispatch_mode(mode)
    keys = [getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None) for mode in reversed(entered)]

    def leave() -> None:
        for key in keys:
            _pop_dispatch_mode(key)

    return leave


def is_device_context(mode: Any) -> bool:
    """Whether a function mode is what ``torch.set_default_device`` or ``with torch.device(...)`` enters."""
    return isinstance(DeviceContext, type) and isinstance(mode, DeviceContext)


def default_device_context() -> Any:
    """What ``torch.set_default_device`` has last set in this thread: a context with a ``device``, or ``None``."""
    return getattr(_GLOBAL_DEVICE_CONTEXT, "device_context", None)


def forget_default_device_context() -> None:
    """Undoes what ``torch.set_default_device`` notes for this thread, once its mode has been taken off."""
    _GLOBAL_DEVICE_CONTEXT.device_context = None


def is_inside_functorch_transform() -> bool:
    """Whether ``vmap``, ``grad`` or another transform of ``torch.func`` runs in this thread."""
    return _functorch_interpreter() is not None


# ---- classes, compiled functions, the profiler, builds ---------------------------------------------------------------

disabled_torch_function: Any = _private(
    "torch._C._disabled_torch_function_impl", "make parameters of replicas as cheap as torch's own"
)
ScriptMethod: type = _private(
    "torch._C.ScriptMethod", "tell methods of ScriptModules", type("NoScriptMethod", (), {}), "none is recognised"
)
pytree: Any = _private("torch.utils._pytree", "walk containers that users have registered with torch")
_private(
    "torch.autograd.profiler._is_profiler_enabled", "name ranges in profiles", False, "profiles have no named ranges"
)
_disable_dynamo = _private(
    "torch._disable_dynamo",
    "have torch.compile run the stages between its graphs",
    lambda function: torch.compiler.disable(function),
    "torch.compiler.disable does the same and imports torch's compiler at once, which takes seconds",
)


def is_profiler_enabled() -> bool:
    """Whether a profiler of torch runs in this process; ``False`` in a torch that does not tell."""
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def between_graphs(function: F) -> F:
    """The function as ``torch.compile`` around it has to run it: not traced. Imports no compiler."""
    disabled: F = _disable_dynamo(function)
    return disabled


def is_compiler_loaded() -> bool:
    """Whether ``torch.compile`` has been used: importing it would take seconds."""
    return "torch._dynamo.eval_frame" in sys.modules


@cache
def _optimized_module() -> Any:
    # Not at import: whoever looks it up imports the compiler.
    return _private("torch._dynamo.eval_frame.OptimizedModule", "tell modules that torch.compile has made")


def compiled_original(item: Any) -> Any:
    """The module or function that ``torch.compile`` has made ``item`` of; ``None`` if it has not."""
    if not is_compiler_loaded():
        return None
    if issubclass(type(item), _optimized_module()):
        return vars(item).get("_modules", {}).get("_orig_mod")
    if type(item) is FunctionType and not vars(item).get("_torchdynamo_disable", False):
        return vars(item).get("_torchdynamo_orig_callable")
    return None


def has_nccl() -> bool:
    """Whether this build of torch has NCCL for the devices of one process: ``torch._C._nccl_broadcast``."""
    return hasattr(torch._C, "_nccl_broadcast")


# ---- attributes of modules -------------------------------------------------------------------------------------------

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module keeps parameters, buffers and children."""

OWN_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps hooks, by number. A ``forward`` may register one."""

HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Attributes in which a module notes, by number, how some hooks are called. No two hooks have one number."""

HOOK_TABLES = (*OWN_HOOK_TABLES, *HOOK_FLAGS)
"""What ``register_*_hook`` writes to."""
