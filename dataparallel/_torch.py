"""Every private name of torch that the library uses: its purpose, and what happens in a torch that lacks it.

torch may rename these without notice, so other rooms ask this one, except ``testing``, which is a backend for torch.
If torch lacks a name, importing the library still works: either there is a fallback, which ``without`` describes, or
calls that need the name raise ``RuntimeError`` with an explanation.
"""

from __future__ import annotations

import contextvars
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, wraps
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[list[Any]])

TRIED = ("2.11", "2.13", "2.15")
"""Releases of torch that have all names."""


@dataclass(frozen=True)
class PrivateName:
    """One private name of torch.

    Attributes:
        path: the name, from ``torch`` on.
        purpose: why the library needs it; it completes "which dataparallel needs to ...".
        without: what happens if torch lacks it; empty if calls that need it raise.
        value: the object at ``path``, or its substitute.
    """

    path: str
    purpose: str
    without: str
    value: Any


NAMES: list[PrivateName] = []
"""The names that `_private` has looked up so far, in that order. Attributes that are read by name are not in it."""


def _private(path: str, purpose: str, instead: Any = None, without: str = "") -> Any:
    """The object at ``path``. If torch lacks it: ``instead``, or an object that raises when it is used."""
    try:
        value = pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        value = _Missing(path, purpose) if instead is None else instead
    NAMES.append(PrivateName(path, purpose, without, value))
    return value


def _attribute(path: str, purpose: str) -> Callable[[Any], Any]:
    """A function that reads the attribute at the end of ``path`` from an instance."""
    value = _private(path, purpose)
    return value if isinstance(value, _Missing) else attrgetter(path.rpartition(".")[2])


class _Missing:
    """The substitute for a name that torch lacks. As a function, a class or a module it raises ``RuntimeError``."""

    def __init__(self, path: str, purpose: str) -> None:
        self._sentence = (
            f"torch {torch.__version__} has no {path}, which dataparallel needs to {purpose}. It has been tried with "
            f"torch {', '.join(TRIED)}: install one of these, or a release of dataparallel that knows your torch"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._sentence)

    __instancecheck__ = __subclasscheck__ = __call__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by Python
            raise AttributeError(name)
        raise RuntimeError(self._sentence)


# ---- the autograd engine ---------------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = _private(
    "torch._C._current_graph_task_id", "tell backward passes that run at the same time from each other"
)


def is_in_backward() -> bool:
    """True if the calling thread runs a node of a backward."""
    return current_graph_task_id() != -1


will_engine_execute_node: Callable[[Any], bool] = _private(
    "torch._C._will_engine_execute_node", "ask whether the running backward pass reaches a parameter"
)
current_node: Callable[[], Any] = _private(
    "torch._C._current_autograd_node", "know whose gradient a hook is called with"
)


def is_returned(leaf_node: Any) -> bool:
    """True if the running backward returns the leaf's gradient, as ``autograd.grad`` does, and accumulates nothing."""
    try:
        will_engine_execute_node(leaf_node)
    except RuntimeError:  # what torch answers for such leaves
        return True
    return False


_queue_callback: Callable[[Callable[[], object]], None] = _private(
    "torch.autograd.Variable._execution_engine.queue_callback", "run a function when a backward pass ends"
)


def queue_callback(function: Callable[[], object]) -> None:
    """Has the engine call the function when the running backward ends, outside of what ``torch.compile`` compiles.

    If the backward fails, the function is dropped.
    """

    def run() -> None:
        function()

    _queue_callback(leave_alone(run))


def wrap_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has ``torch.autograd.backward`` and ``torch.autograd.grad`` start the engine by what this makes of it, once."""
    if getattr(torch.autograd, "_engine_run_backward", None) is _run_engine:
        vars(torch.autograd)["_engine_run_backward"] = wrap(_run_engine)


_run_engine: Callable[..., Any] = _private(
    "torch.autograd._engine_run_backward",
    "have backward(inputs=...) reach the parameters of fully_shard",
    lambda *args, **kwargs: None,
    "backward(inputs=...) gives the parameters of fully_shard no gradients",
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
    "gradients are summed only after backward has computed all of them",
)


def sequence_nr(node: Any) -> int:
    """The number of a node of the graph in the order of its thread, in which backward runs from the highest on.

    Without torch's method for it, 0: what is shared may be found before a Python function on the way to it.
    """
    return int(getattr(node, "_sequence_nr", int)())


# ---- streams --------------------------------------------------------------------------------------------------------

current_stream_at: Callable[[int], torch.Stream] = _private(
    "torch._C._accelerator_getStream",
    "read the current stream of an accelerator at every lookup of a replica's parameter",
    torch.accelerator.current_stream,
    "each lookup takes a microsecond longer",
)


def _exchange_device(index: int) -> int:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    return before


exchange_device: Callable[[int], int] = _private(
    "torch._C._accelerator_exchangeDevice",
    "make a stream's device current around each use of an event, of which a step has hundreds",
    _exchange_device,
    "each event takes microseconds longer, and going back to a device that nobody uses creates a context on it",
)
go_back_to_device: Callable[[int], object] = _private(
    "torch._C._accelerator_maybeExchangeDevice",
    "go back to the former device without a context on it",
    torch.accelerator.set_device_index,
    "going back to a device that nobody uses creates a context on it",
)

# ---- process groups --------------------------------------------------------------------------------------------------

_backend_of_group = _attribute("torch.distributed.ProcessGroup._get_backend", "read the timeout of a process group")
_timeout_of_backend = _attribute(
    "torch._C._distributed_c10d.Backend.Options._timeout", "read the timeout of a process group"
)

name_of_group: Callable[[list[int]], str] = _private(
    "torch.distributed.distributed_c10d._hash_ranks_to_str",
    "see that all ranks have one name for a new process group",
    lambda ranks: "",
    "where torch's names differ, making a second group of the same ranks ends with the group's timeout",
)


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """How long a process group waits for a collective of tensors on ``device``."""
    timeout: timedelta = _timeout_of_backend(_backend_of_group(group)(device).options)
    return timeout


@cache
def wrap_full_states(gather: Callable[[F], F], distribute: Callable[[F], F]) -> None:
    """Has ``torch.distributed.checkpoint.state_dict`` call what these make of its functions for full states, once.

    It takes them from another module of torch when it is imported, which may have happened.
    """
    # Not looked up at import, because that would import torch's own distributed tensors.
    purpose = "make and divide full states in torch.distributed.checkpoint"
    originals = {
        "_gather_state_dict": _private("torch.distributed._state_dict_utils._gather_state_dict", purpose),
        "_distribute_state_dict": _private("torch.distributed._state_dict_utils._distribute_state_dict", purpose),
    }
    modules = [sys.modules.get(f"torch.distributed.{name}") for name in ("_state_dict_utils", "checkpoint.state_dict")]
    for (name, original), wrap in zip(originals.items(), (gather, distribute), strict=True):
        for module in modules:
            if module is not None and getattr(module, name, None) is original:
                setattr(module, name, wrap(original))  # type: ignore[arg-type]


_TAKE_ADDRESS_0 = {
    # `async_save` copies tensors to host memory by their storage, unless the address is 0, as it is for a `DTensor`.
    "torch.distributed.checkpoint._state_dict_stager",
    "torch.distributed._state_dict_utils",
    # On CUDA it moves an RNN's weights into one buffer, unless several have one address.
    "torch.nn.modules.rnn",
}


def takes_address_0() -> bool:
    """True if the caller's caller is code of torch that leaves tensors alone if their ``data_ptr()`` is 0."""
    return sys._getframe(2).f_globals.get("__name__") in _TAKE_ADDRESS_0


# ---- operators -------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
else:
    OpOverload = _private("torch._ops.OpOverload", "say of what type operators are")

# ---- tensors and storages --------------------------------------------------------------------------------------------

version_of: Callable[[Tensor], int] = _attribute(
    "torch.Tensor._version", "see that a tensor was changed in place (tensors made in inference mode have no version)"
)
tensor_address: Callable[[Tensor], int] = _attribute(
    "torch.Tensor._cdata", "see that torch has swapped a tensor with another one, whose place in a graph is its own"
)
use_count: Callable[[Tensor], int] = _private(
    "torch.Tensor._use_count", "count the holders of a tensor outside of Python"
)
storage_address: Callable[[Any], int] = _attribute("torch.UntypedStorage._cdata", "tell storages from each other")
storage_use_count: Callable[[int], int] = _private(
    "torch._C._storage_Use_Count", "count the holders of the storage at an address"
)
base_of: Callable[[Tensor], Tensor | None] = _attribute("torch.Tensor._base", "see of which tensor one is a view")
hooks_of: Callable[[Tensor], Any] = _attribute("torch.Tensor._backward_hooks", "see hooks on a tensor")
hooks_after_accumulation_of: Callable[[Tensor], Any] = _attribute(
    "torch.Tensor._post_accumulate_grad_hooks", "see hooks on a parameter"
)
# The descriptors of both, for a class that overrides them.
BACKWARD_HOOKS: Any = getattr(torch.Tensor, "_backward_hooks", None)
POST_ACCUMULATE_GRAD_HOOKS: Any = getattr(torch.Tensor, "_post_accumulate_grad_hooks", None)


def share_hooks(new: Tensor, old: Tensor) -> None:
    """Puts the hooks of ``old`` on ``new`` too. The handles that users have remove them from both."""
    if (hooks := hooks_of(old)) is not None:
        new._backward_hooks = hooks
    if (hooks := hooks_after_accumulation_of(old)) is not None:
        new._post_accumulate_grad_hooks = hooks


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] | Literal[False] = _private(
    "torch._C._autograd._unsafe_set_version_counter",
    "have autograd refuse parameters without memory that it saved",
    False,
    "a backward that reads a sharded parameter before it is gathered may crash instead of raising",
)
make_wrapper_subclass: Callable[..., Any] = _private(
    "torch.Tensor._make_wrapper_subclass", "make a tensor whose parts lie on several devices"
)
refuse_data_pointers: Callable[[Tensor], object] = _private(
    "torch._C._set_throw_on_mutable_data_ptr",
    "raise, instead of crashing, where C++ code wants the memory of a sharded tensor",
    lambda tensor: None,
    "C++ code that asks a sharded tensor for its memory, such as to_dlpack, gets a null pointer",
)
to_copy = _private("torch.ops.aten._to_copy.default", "take tensors whose parts lie on several devices to others")
unsafe_view = _private("torch.ops.aten._unsafe_view.default", "give such a tensor another shape")
pin_memory = _private("torch.ops.aten._pin_memory.default", "pin tensors whose parts have been taken to the CPU")
local_scalar_dense = _private("torch.ops.aten._local_scalar_dense.default", "read the item of such a tensor")
_indices = _private("torch.Tensor._indices", "reach the memory of a sparse tensor that is not coalesced")
_values = _private("torch.Tensor._values", "reach the memory of a sparse tensor that is not coalesced")
flatten_dense_tensors: Callable[[list[Tensor]], Tensor] = _private(
    "torch._utils._flatten_dense_tensors",
    "flatten many tensors by one operator",
    lambda tensors: torch.cat([tensor.contiguous().view(-1) for tensor in tensors]),
    "a view of each tensor is made first, which takes longer",
)


def _padded_and_joined(tensors: Sequence[Tensor], dim: int, chunks: int, *, out: Tensor) -> None:
    """In the place of ``torch._chunk_cat`` for matrices that are cut along their first dimension."""
    rows = [torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % chunks)) for tensor in tensors]
    torch.cat([tensor.reshape(chunks, -1) for tensor in rows], 1, out=out)


chunk_cat: Callable[..., None] = _private(
    "torch._chunk_cat",
    "copy the gradients of a unit into one matrix",
    _padded_and_joined,
    "gradients are padded and joined, which takes more than one operator",
)
foreach_add: Callable[..., Sequence[Tensor]] = _private("torch._foreach_add", "add lists of tensors")
foreach_add_: Callable[..., None] = _private("torch._foreach_add_", "add a list of tensors to another one in place")
_get_schema = _private("torch._C._get_schema", "read which arguments an operator has, and which it writes to")
foreach_norm = _private("torch.ops.aten._foreach_norm.Scalar", "clip gradients whose parts lie on several devices")
foreach_max = _private("torch.ops.aten._foreach_max.default", "find maxima of parts that lie on several devices")
unscale = _private(
    "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default",
    "scale gradients whose parts lie on several devices",
)
foreach_types_of_optimizers: list[type] = _private(
    "torch.optim.optimizer._foreach_supported_types", "have optimizers call one operator for all sharded parameters"
)
foreach_types_of_clipping: list[type] = _private(
    "torch.utils._foreach_utils._foreach_supported_types", "clip all sharded gradients by one operator"
)
is_functional_tensor: Callable[[Tensor], bool] = _private(
    "torch._is_functional_tensor",
    "tell tensors of functionalisation from plain ones in tests",
    lambda tensor: False,
    "tests of sharded operators may try to distribute one",
)
is_functorch_tensor: Callable[[Tensor], bool] = _private(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "tell tensors inside torch.func's transforms from plain ones in tests",
    lambda tensor: False,
    "tests of sharded operators may try to distribute one",
)
_DispatchKeySet = _private("torch._C.DispatchKeySet", "name the dispatch key that tracks views")
_DispatchKey = _private("torch._C.DispatchKey", "name the dispatch key that tracks views")
_ExcludeDispatchKeyGuard = _private(
    "torch._C._ExcludeDispatchKeyGuard", "make tensors that share memory without being views to autograd"
)


def sparse_memory(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not."""
    return _indices(tensor), _values(tensor)


def schema_of(operator: OpOverload) -> Any:
    """The schema of an operator: its arguments, and which of them it writes to."""
    name, _, overload = operator.name().partition(".")
    return _get_schema(name, overload)


def without_view_tracking() -> AbstractContextManager[Any]:
    """Inside, autograd does not take new tensors on shared memory for views; they have their own version counters."""
    guard: AbstractContextManager[Any] = _ExcludeDispatchKeyGuard(_DispatchKeySet(_DispatchKey.ADInplaceOrView))
    return guard


# ---- settings of a thread, which workers take over -------------------------------------------------------------------

is_fwd_grad_enabled: Callable[[], bool] = _private("torch._C._is_fwd_grad_enabled", "hand forward-mode AD to workers")
set_fwd_grad_enabled: Callable[[bool], None] = _private(
    "torch._C._set_fwd_grad_enabled", "hand forward-mode AD to workers"
)
is_multithreading_enabled: Callable[[], bool] = _private(
    "torch._C._is_multithreading_enabled", "choose single-threaded backward in workers"
)
set_multithreading_enabled: Callable[[bool], None] = _private(
    "torch._C._set_multithreading_enabled", "choose single-threaded backward in workers"
)
is_view_replay_enabled: Callable[[], bool] = _private("torch._C._is_view_replay_enabled", "hand view replay to workers")
set_view_replay_enabled: Callable[[bool], None] = _private(
    "torch._C._set_view_replay_enabled", "hand view replay to workers"
)
is_any_autocast_enabled: Callable[[], bool] = _private(
    "torch._C._is_any_autocast_enabled", "see whether autocast is on for any device"
)
autocast_device_types: Callable[[], list[str]] = _private(
    "torch._C._autocast_supported_devices", "hand autocast for every type of device to workers"
)
is_torch_function_all_disabled: Callable[[], bool] = _private(
    "torch._C._is_torch_function_all_disabled", "disable __torch_function__ in workers"
)
is_torch_function_enabled: Callable[[], bool] = _private(
    "torch._C._is_torch_function_enabled", "disable __torch_function__ in workers"
)
DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = _private(
    "torch._C.DisableTorchFunction", "disable __torch_function__ in workers"
)
DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[Any]] = _private(
    "torch._C.DisableTorchFunctionSubclass", "disable __torch_function__ in workers"
)
function_modes: Callable[[], list[Any]] = _private(
    "torch.overrides._get_current_function_mode_stack", "hand torch function modes to workers"
)
push_function_mode: Callable[[Any], None] = _private(
    "torch.overrides._push_mode", "hand torch function modes to workers"
)
pop_function_mode: Callable[[], Any] = _private("torch.overrides._pop_mode", "hand torch function modes to workers")
dispatch_modes: Callable[[], list[Any]] = _private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "hand torch dispatch modes to workers"
)
_push_dispatch_mode = _private("torch.utils._python_dispatch._push_mode", "hand torch dispatch modes to workers")
_pop_dispatch_mode = _private("torch.utils._python_dispatch._pop_mode", "hand torch dispatch modes to workers")
top_saved_tensors_hooks: Callable[[bool], Any] = _private(
    "torch._C._autograd._top_saved_tensors_default_hooks", "hand saved-tensor hooks to workers"
)
push_saved_tensors_hooks: Callable[..., None] = _private(
    "torch._C._autograd._push_saved_tensors_default_hooks", "hand saved-tensor hooks to workers"
)
pop_saved_tensors_hooks: Callable[[], object] = _private(
    "torch._C._autograd._pop_saved_tensors_default_hooks", "hand saved-tensor hooks to workers"
)
why_saved_tensors_hooks_are_disabled: Callable[[], str | None] = _private(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", "disable saved-tensor hooks in workers"
)
disable_saved_tensors_hooks: Callable[[str], None] = _private(
    "torch._C._autograd._saved_tensors_hooks_disable", "disable saved-tensor hooks in workers"
)
enable_saved_tensors_hooks: Callable[[], None] = _private(
    "torch._C._autograd._saved_tensors_hooks_enable", "disable saved-tensor hooks in workers"
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

_private(
    "torch.nn.utils.parametrize._cache_enabled",
    "refuse to run replicas inside parametrize.cached()",
    0,
    "replicas there use each other's weights",
)


def push_dispatch_modes(modes: Sequence[Any]) -> Callable[[], None]:
    """Enters dispatch modes, outermost first. Returns a function that leaves them."""
    for mode in modes:
        _push_dispatch_mode(mode)
    keys = [getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None) for mode in reversed(modes)]

    def leave() -> None:
        for key in keys:
            _pop_dispatch_mode(key)

    return leave


def is_device_context(mode: Any) -> bool:
    """True for a mode of ``torch.set_default_device`` or ``torch.device``. Always False without ``DeviceContext``."""
    return isinstance(DeviceContext, type) and isinstance(mode, DeviceContext)


def default_device_context() -> Any:
    """The context, with a ``device``, that ``torch.set_default_device`` has last set in this thread, or ``None``."""
    return getattr(_GLOBAL_DEVICE_CONTEXT, "device_context", None)


def forget_default_device_context() -> None:
    """Clears the context that ``torch.set_default_device`` keeps for this thread. Its mode has been left before."""
    _GLOBAL_DEVICE_CONTEXT.device_context = None


def are_parametrizations_cached() -> bool:
    """True inside ``torch.nn.utils.parametrize.cached()``, of any thread."""
    return getattr(torch.nn.utils.parametrize, "_cache_enabled", 0) > 0


def is_inside_functorch_transform() -> bool:
    """True if ``vmap``, ``grad`` or another transform of ``torch.func`` runs in this thread."""
    return _functorch_interpreter() is not None


# ---- classes, compiled functions, the profiler, builds ---------------------------------------------------------------

disabled_torch_function: Any = _private(
    "torch._C._disabled_torch_function_impl", "make operators on parameters of replicas as fast as on torch's own"
)
ScriptMethod: type = _private(
    "torch._C.ScriptMethod",
    "recognise methods of ScriptModules",
    type("NoScriptMethod", (), {}),
    "they are not recognised",
)
pytree: Any = _private("torch.utils._pytree", "walk containers that users have registered with torch")
_private(
    "torch.autograd.profiler._is_profiler_enabled", "name ranges in profiles", False, "profiles have no named ranges"
)
_ProfilerOptions = _private("torch._C._profiler._ExperimentalConfig", "record all threads in a trace")
UnsupportedFakeTensor: type = _private(
    "torch._subclasses.UnsupportedFakeTensorException",
    "tell torch.compile that a tensor cannot be in a graph",
    type("NoUnsupportedFakeTensor", (RuntimeError,), {}),
    "compiled functions that meet sharded tensors fail instead of going on without a graph",
)
_WITHOUT_STRATEGIES = (
    "torch.compiler.disable keeps it out, and loads the compiler with the library, which takes seconds"
)
_NOTHING = object()
_set_strategy = _private(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "keep torch.compile out of functions that run between its graphs",
    _NOTHING,
    _WITHOUT_STRATEGIES,
)
_Strategy = _private(
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "tell torch.compile how to treat a function and what it calls",
    _NOTHING,
    _WITHOUT_STRATEGIES,
)
_actions = _private(
    "torch._C._dynamo.eval_frame._FrameAction",
    "name what torch.compile may do with a function",
    _NOTHING,
    _WITHOUT_STRATEGIES,
)


def walked_as_a_list(cls: C) -> C:
    """A decorator of a class of lists: torch's functions that map over structures look into its objects."""
    pytree.register_pytree_node(
        cls,
        lambda entries: (list(entries), None),
        lambda entries, _: cls(entries),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=lambda entries: ([(pytree.SequenceKey(i), each) for i, each in enumerate(entries)], None),
    )
    return cls


def is_profiler_enabled() -> bool:
    """True if a profiler of torch runs in this process; False in a torch that does not tell.

    It asks about the process: a profiler of all threads leaves no mark in the state of a single thread.
    """
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def profiler_of_all_threads() -> Any:
    """The ``experimental_config`` of a profiler that records all threads."""
    return _ProfilerOptions(profile_all_threads=True)


def not_traced(function: F) -> F:
    """Keeps ``torch.compile`` out of a function and out of all that it calls. Returns the same function.

    It decorates what a compiled function may call: the graph ends before the call, and another one begins after it. It
    also decorates what torch calls by itself (``backward``, hooks, operators of tensor subclasses): while a compiled
    function waits for ``loss.backward()``, the compiler would compile each of them. It is ``torch.compiler.disable``
    without a frame around the function, and imports no compiler, which would take seconds.
    """
    if not _has_strategies():
        disabled: F = torch.compiler.disable(function, reason=_WHY_NOT_TRACED)
        return disabled
    leave_alone(function)
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _WHY_NOT_TRACED
    return function


def not_compiled(function: F) -> F:
    """Keeps ``torch.compile`` from compiling a function by itself, but not what it calls. Returns the function.

    A compiled function still takes it into its graph where it can.
    """
    _set_actions(function, "DEFAULT")
    return function


_WHY_NOT_TRACED = (
    "dataparallel sends tensors between devices and runs replicas in threads, which is no graph. There is one graph "
    "before the call and one after it, so leave out fullgraph=True"
)


def leave_alone(function: F) -> F:
    """Keeps ``torch.compile`` from compiling a function by itself, and all that it calls then. Returns the function.

    A compiled function still takes it into its graph where it can.
    """
    _set_actions(function, "SKIP")
    return function


def _set_actions(function: Any, what_it_calls: str) -> None:
    if _has_strategies() and isinstance(function, FunctionType):
        _set_strategy(function.__code__, _Strategy(_actions.SKIP, getattr(_actions, what_it_calls)))


def _has_strategies() -> bool:
    return not any(found is _NOTHING for found in (_set_strategy, _Strategy, _actions))


def is_compiler_loaded() -> bool:
    """True if ``torch.compile`` has been used. It imports no compiler, which would take seconds."""
    return "torch._dynamo.eval_frame" in sys.modules


_was_compiler_in_use = False


def note_whether_compiler_is_in_use() -> bool:
    """True if something has been compiled in this process, as far as this function has seen.

    torch's optimizers load the compiler without using it. ``torch._dynamo.reset()`` makes torch forget what was
    compiled, but compiled functions stay compiled. So this notes what it finds, for good, and has to be called before
    and after code that may compile something.
    """
    global _was_compiler_in_use
    if not _was_compiler_in_use and is_compiler_loaded():
        _was_compiler_in_use = any(backend is not None for backend in list(_backends().values()))
    return _was_compiler_in_use


@cache
def _backends() -> dict[Any, Any]:
    # As `_compiler_part`. A decorator that disables the compiler has the backend None.
    found: dict[Any, Any] = _private(
        "torch._dynamo.eval_frame.cached_backends",
        "see whether torch.compile is in use, so that code that is not compiled starts before all parameters are there",
        {0: "unknown"},
        "once the compiler is loaded, replicas start when all parameters are there",
    )
    return found


@cache
def _compiler_part(path: str, purpose: str) -> Any:
    # Not looked up at import, because that would import the compiler, which takes seconds.
    return _private(path, purpose)


@cache
def _optimized_module() -> Any:
    return _compiler_part("torch._dynamo.eval_frame.OptimizedModule", "recognise modules that torch.compile has made")


def compiled_original(item: Any) -> Any:
    """The module or function from which ``torch.compile`` made ``item``; ``None`` if it did not make it."""
    if not is_compiler_loaded():
        return None
    if issubclass(type(item), _optimized_module()):
        return vars(item).get("_modules", {}).get(ORIGINAL_OF_COMPILED)
    if type(item) is FunctionType and not vars(item).get("_torchdynamo_disable", False):
        return vars(item).get("_torchdynamo_orig_callable")
    return None


# ---- compiling -------------------------------------------------------------------------------------------------------

ORIGINAL_OF_COMPILED = "_orig_mod"
"""The name of the module as a child of the one that ``torch.compile`` has made from it."""

OWN_OF_COMPILED = (
    "forward",
    "_forward",
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "get_compiler_config",
)
"""Attributes of a module that ``torch.compile`` has made, which lead to the code or methods of the original."""


def say_that_it_is_disabled(call: Any) -> None:
    """Marks what a module calls, so that the compiler does not look into the module."""
    call._torchdynamo_disable = True


def compiler_context(compiled: Any) -> Any:
    """The context by which ``torch.compile`` made a module or function: its backend and options.

    ``None`` if that torch keeps no context with it, or keeps it elsewhere.
    """
    context_class = _compiler_part(
        "torch._dynamo.eval_frame._TorchDynamoContext", "compile replicas as the module was compiled"
    )
    if issubclass(type(compiled), _optimized_module()):
        found = vars(compiled).get("dynamo_ctx")
    else:
        names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(compiled, "__closure__", None) or (), strict=False))
        found = cells["self"].cell_contents if "self" in cells else None
    return found if isinstance(found, context_class) else None


def copy_of_context(context: Any) -> Any:
    """Another context that compiles in the same way."""
    own = object.__new__(type(context))
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


@cache
def trace_branches_by(run_alone: Callable[..., Any]) -> None:
    """Makes ``torch.cond``, ``while_loop``, ``scan`` and ``map`` call ``run_alone(trace, ...)`` to trace functions.

    torch traces in each call that needs gradients, and again in its backward. It uses globals of ``torch.fx``, so
    threads that trace at the same time fail: "CURRENT_PATCHER is None in finally block". This replaces names in the
    modules of these operators. Where torch has no such names, replicas that run at the same time may still fail.
    """
    package = "torch._higher_order_ops"
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    for name in ("materialize_as_graph", "_hop_compile_and_call"):
        original: Callable[..., Any] | None = getattr(sys.modules[f"{package}.utils"], name, None)
        if original is not None:
            one_at_a_time = wraps(original)(partial(run_alone, original))
            for module in modules:
                if getattr(module, name, None) is original:
                    setattr(module, name, one_at_a_time)


class _ContextForEach:
    """A context that several threads may run functions in at the same time: each runs in a copy."""

    def __init__(self, context: contextvars.Context) -> None:
        self.copy = context.copy  # torch 2.15 makes a copy itself

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.copy().run(function, *args, **kwargs)


@cache
def _count_graphs() -> Callable[[CodeType], int]:
    number = "torch._dynamo.eval_frame._get_total_cache_entry_count"  # from 2.13 on, and the only one for all regions
    purpose, without = "see whether another thread has compiled a graph", "a graph may be compiled once in each thread"
    if hasattr(sys.modules["torch._dynamo.eval_frame"], number.rpartition(".")[2]):
        found: Callable[[CodeType], int] = _private(number, purpose)
        return found
    entries = "torch._dynamo.eval_frame._debug_get_cache_entry_list"
    listed: Callable[[CodeType], list[Any]] = _private(entries, purpose, lambda code: range(sys.maxsize), without)
    return lambda code: len(listed(code))


def number_of_graphs(code: CodeType) -> int:
    """How many graphs the compiler has for ``code``."""
    return _count_graphs()(code)


def has_graph(result: Any) -> bool:
    """True if what a compiler's callback has returned is code with graphs; otherwise the frame runs as it is."""
    return getattr(result, "guarded_code", None) is not None


def frames_that_failed() -> int:
    """How many frames this process could not compile so far, and ran as they are."""
    frames = _compiler_part("torch._dynamo.utils.counters", "count what could not be compiled")["frames"]
    return int(frames["total"] - frames["ok"])


def _inductor_config() -> Any:
    purpose = "see what is recorded as CUDA graphs, and refuse parameters inside graphs"
    return _compiler_part("torch._inductor.config", purpose)


def uses_cuda_graphs(context: Any) -> bool:
    """True if what a context compiles is recorded as CUDA graphs on CUDA devices."""
    backend = _callbacks(context.callback)[-1]
    if getattr(backend, "compiler_name", None) == "cudagraphs":
        return True
    own = getattr(backend, "config", None)
    if not isinstance(own, dict):  # Inductor's have one
        return False
    config = _inductor_config()
    return bool(own.get("triton.cudagraphs", config.triton.cudagraphs))


def refuse_parameters_in_graphs() -> None:
    """Raises ``RuntimeError`` if the compiler would make the parameters of one replica part of a graph."""
    config = _inductor_config()
    if config.freezing:
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
    config = _compiler_part("torch._dynamo.config", "raise the number of graphs of a function for several devices")
    functorch_config = _compiler_part("torch._functorch.config", "compile a backward together with its forward")
    limits = {name: devices * getattr(config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with config.patch(**limits), functorch_config.patch(force_non_lazy_backward_lowering=True):
        yield


def is_compiled_backward(node: Any) -> bool:
    """True for a node of autograd's graph that runs the backward of compiled code."""
    return type(node).__name__ == "CompiledFunctionBackward"


@contextmanager
def compiled_backwards_keep_graphs() -> Iterator[None]:
    """Lets compiled code that may write to what its forward has saved run in a backward with ``retain_graph=True``.

    This is for captures, whose forward is launched anew before each backward. torch 2.12 and later keep the setting in
    a context variable, and hand the context over to the threads of the engine.
    """
    if not is_compiler_loaded():
        yield
        return
    functorch_config = _compiler_part("torch._functorch.config", "compile a backward together with its forward")
    with functorch_config.patch(donated_buffer=False):
        yield


def has_nccl() -> bool:
    """True if this build of torch has NCCL for the devices of one process: ``torch._C._nccl_broadcast``."""
    return hasattr(torch._C, "_nccl_broadcast")


# ---- attributes of modules -------------------------------------------------------------------------------------------

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module keeps parameters, buffers and children."""

OWN_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps hooks by number. A ``forward`` may register hooks."""

HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Attributes in which a module keeps, by the hook's number, how some hooks are called. Each hook has its own number."""

HOOK_TABLES = (*OWN_HOOK_TABLES, *HOOK_FLAGS)
"""All attributes that ``register_*_hook`` writes to."""
