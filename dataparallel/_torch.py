"""Every private name of torch that the library uses, and its purpose.

torch may rename these without notice, so other rooms ask this one, except ``testing``; what ``torch.compile`` keeps in
its own objects is in ``replicas.compiled.torch_compile``. If torch lacks a name, importing the library still works, and
calls that need the name raise ``RuntimeError`` with an explanation.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[list[Any]])

TRIED = ("2.11", "2.13", "2.14", "2.15")
"""Releases of torch that have all names."""


class PrivateName(NamedTuple):
    """One private name of torch. ``purpose`` completes "which dataparallel needs to ..."."""

    path: str
    purpose: str
    value: Any


NAMES: list[PrivateName] = []
"""The names that `private` has looked up so far, in that order. Attributes that are read by name are not in it."""


def private(path: str, purpose: str, instead: Any = None) -> Any:
    """The object at ``path``. If torch lacks it: ``instead``, or an object that raises when it is used."""
    try:
        value = pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        value = _Missing(path, purpose) if instead is None else instead
    NAMES.append(PrivateName(path, purpose, value))
    return value


def _attribute(path: str, purpose: str) -> Callable[[Any], Any]:
    """A function that reads the attribute at the end of ``path`` from an instance."""
    value = private(path, purpose)
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

current_graph_task_id = private("torch._C._current_graph_task_id", "tell simultaneous backward passes apart")


def is_in_backward() -> bool:
    """True if the calling thread runs a node of a backward."""
    return current_graph_task_id() != -1


use_count = private("torch.Tensor._use_count", "know if a graph reads a parameter")
_storage_use_count = private("torch._C._storage_Use_Count", "know if a graph reads a parameter's memory")
will_engine_execute_node = private("torch._C._will_engine_execute_node", "ask if backward reaches a parameter")
current_node = private("torch._C._current_autograd_node", "know whose gradient a hook is called with")


def tensors_on(storage: torch.UntypedStorage) -> int:
    """Counts the references to the storage. Each tensor on it has one, whether Python or a graph holds the tensor."""
    return int(_storage_use_count(storage._cdata))


def is_returned(leaf_node: Any) -> bool:
    """True if the running backward returns the leaf's gradient, as ``autograd.grad`` does, and accumulates nothing."""
    try:
        will_engine_execute_node(leaf_node)
    except RuntimeError:  # what torch answers for such leaves
        return True
    return False


_queue_callback = private("torch.autograd.Variable._execution_engine.queue_callback", "act when a backward ends")


def queue_callback(function: Callable[[], object]) -> None:
    """The engine calls it when the running backward ends, outside of compiled code. If that fails, it is dropped."""

    def run() -> None:
        function()

    _queue_callback(leave_alone(run))


def wrap_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has ``torch.autograd.backward`` and ``torch.autograd.grad`` start the engine by what this makes of it, once."""
    if vars(torch.autograd).get("_engine_run_backward") is _run_engine:
        vars(torch.autograd)["_engine_run_backward"] = wrap(_run_engine)


_run_engine: Callable[..., Any] = private(
    "torch.autograd._engine_run_backward", "have backward(inputs=...) reach sharded parameters"
)
rebuild_engine = private("torch.autograd.Variable._execution_engine.is_checkpoint_valid", "rebuild the engine")
set_sequence_nr = private("torch._C._FunctionBase._set_sequence_nr", "have sums begin during backward")


def sequence_nr(node: Any) -> int:
    """The number of a node of the graph in the order of its thread, in which backward runs from the highest on.

    Without torch's method for it, 0: what is shared may be found before a Python function on the way to it.
    """
    return int(getattr(node, "_sequence_nr", int)())


# ---- streams --------------------------------------------------------------------------------------------------------

current_stream_at = private("torch._C._accelerator_getStream", "read an accelerator's current stream")
exchange_device = private("torch._C._accelerator_exchangeDevice", "use events of other devices")
go_back_to_device = private("torch._C._accelerator_maybeExchangeDevice", "leave a device without a context on it")

# ---- process groups --------------------------------------------------------------------------------------------------

_backend_of_group = _attribute("torch.distributed.ProcessGroup._get_backend", "read the timeout of a process group")
_timeout_of_backend = _attribute("torch._C._distributed_c10d.Backend.Options._timeout", "read a group's timeout")

all_gather_of = _attribute("torch._C._distributed_c10d.Backend._allgather_base", "gather tensors of ranks in one")
reduce_scatter_of = _attribute("torch._C._distributed_c10d.Backend._reduce_scatter_base", "sum parts over ranks")


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
        "_gather_state_dict": private("torch.distributed._state_dict_utils._gather_state_dict", purpose),
        "_distribute_state_dict": private("torch.distributed._state_dict_utils._distribute_state_dict", purpose),
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
    OpOverload = private("torch._ops.OpOverload", "say of what type operators are")

# ---- tensors and storages --------------------------------------------------------------------------------------------

version_of = _attribute("torch.Tensor._version", "see that a tensor was changed in place")
tensor_address = _attribute("torch.Tensor._cdata", "see that torch has swapped a tensor with another one")
base_of = _attribute("torch.Tensor._base", "see of which tensor one is a view")
hooks_of = _attribute("torch.Tensor._backward_hooks", "see hooks on a tensor")
hooks_after_accumulation_of = _attribute("torch.Tensor._post_accumulate_grad_hooks", "see hooks on a parameter")
# The descriptors of both, for a class that overrides them.
BACKWARD_HOOKS: Any = getattr(torch.Tensor, "_backward_hooks", None)
POST_ACCUMULATE_GRAD_HOOKS: Any = getattr(torch.Tensor, "_post_accumulate_grad_hooks", None)


def share_hooks(new: Tensor, old: Tensor) -> None:
    """Puts the hooks of ``old`` on ``new`` too. The handles that users have remove them from both."""
    if (hooks := hooks_of(old)) is not None:
        new._backward_hooks = hooks
    if (hooks := hooks_after_accumulation_of(old)) is not None:
        new._post_accumulate_grad_hooks = hooks


set_versions = private("torch._C._autograd._unsafe_set_version_counter", "have autograd refuse freed parameters")
make_wrapper_subclass = private("torch.Tensor._make_wrapper_subclass", "make sharded tensors")
refuse_data_pointers = private("torch._C._set_throw_on_mutable_data_ptr", "refuse C++ a sharded tensor's memory")
to_copy = private("torch.ops.aten._to_copy.default", "take tensors whose parts lie on several devices to others")
local_scalar_dense = private("torch.ops.aten._local_scalar_dense.default", "read the item of such a tensor")
_indices = private("torch.Tensor._indices", "reach the memory of a sparse tensor that is not coalesced")
_values = private("torch.Tensor._values", "reach the memory of a sparse tensor that is not coalesced")
flatten_dense_tensors = private("torch._utils._flatten_dense_tensors", "flatten many tensors by one operator")
chunk_cat = private("torch._chunk_cat", "copy the gradients of a unit into one matrix")
foreach_add = private("torch._foreach_add", "add lists of tensors")
foreach_add_ = private("torch._foreach_add_", "add a list of tensors to another one in place")
_get_schema = private("torch._C._get_schema", "read which arguments an operator has, and which it writes to")
foreach_norm = private("torch.ops.aten._foreach_norm.Scalar", "clip gradients whose parts lie on several devices")
unscale = private("torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default", "unscale sharded gradients")
foreach_types_of_optimizers = private("torch.optim.optimizer._foreach_supported_types", "step in one call")
foreach_types_of_clipping = private("torch.utils._foreach_utils._foreach_supported_types", "clip in one call")
is_functional_tensor = private("torch._is_functional_tensor", "tell functional tensors from plain ones")
is_functorch_tensor = private("torch._C._functorch.is_functorch_wrapped_tensor", "tell such tensors from others")
_DispatchKeySet = private("torch._C.DispatchKeySet", "name the dispatch key that tracks views")
_DispatchKey = private("torch._C.DispatchKey", "name the dispatch key that tracks views")
_ExcludeDispatchKeyGuard = private("torch._C._ExcludeDispatchKeyGuard", "share memory without views")


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


def free_failed_pool(device: int, pool: Any) -> bool:
    """True if a failed capture still had ``pool``, as before torch 2.14: no other capture may use it then."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # torch says that nothing is captured into it
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


# ---- settings of a thread, which workers take over -------------------------------------------------------------------

is_fwd_grad_enabled = private("torch._C._is_fwd_grad_enabled", "hand forward-mode AD to workers")
set_fwd_grad_enabled = private("torch._C._set_fwd_grad_enabled", "hand forward-mode AD to workers")
is_multithreading_enabled = private("torch._C._is_multithreading_enabled", "hand this switch to workers")
is_view_replay_enabled = private("torch._C._is_view_replay_enabled", "hand view replay to workers")
set_view_replay_enabled = private("torch._C._set_view_replay_enabled", "hand view replay to workers")
is_any_autocast_enabled = private("torch._C._is_any_autocast_enabled", "see whether autocast is on for any device")
autocast_device_types = private("torch._C._autocast_supported_devices", "hand autocast to workers")
is_torch_function_all_disabled = private("torch._C._is_torch_function_all_disabled", "hand this switch to workers")
is_torch_function_enabled = private("torch._C._is_torch_function_enabled", "hand this switch to workers")
DisableTorchFunction = private("torch._C.DisableTorchFunction", "hand this switch to workers")
DisableTorchFunctionSubclass = private("torch._C.DisableTorchFunctionSubclass", "hand this switch to workers")
function_modes = private("torch.overrides._get_current_function_mode_stack", "hand modes to workers")
push_function_mode = private("torch.overrides._push_mode", "hand modes to workers")
pop_function_mode = private("torch.overrides._pop_mode", "hand modes to workers")
dispatch_modes = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "hand modes to workers")
DispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", "see random draws in a captured backward")
_push_dispatch_mode = private("torch.utils._python_dispatch._push_mode", "hand modes to workers")
_pop_dispatch_mode = private("torch.utils._python_dispatch._pop_mode", "hand modes to workers")
top_saved_tensors_hooks = private("torch._C._autograd._top_saved_tensors_default_hooks", "hand hooks to workers")
why_hooks_are_disabled = private(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", "hand hooks to workers"
)
DeviceContext = private("torch.utils._device.DeviceContext", "translate the default device to a slot's")
_GLOBAL_DEVICE_CONTEXT = private("torch._GLOBAL_DEVICE_CONTEXT", "see the default device")
_functorch_interpreter = private("torch._C._functorch.peek_interpreter_stack", "refuse transforms around calls")

private("torch.nn.utils.parametrize._cache_enabled", "refuse to run replicas inside parametrize.cached()")
private("torch.autograd.forward_ad._current_level", "refuse forward-mode derivatives around calls")

GLOBAL_HOOKS = [
    private(f"torch.nn.modules.module._global_{kind}_hooks", "see hooks that are set for all modules")
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
]
"""The tables of hooks for all modules."""


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


def is_in_dual_level() -> bool:
    """True inside ``torch.autograd.forward_ad.dual_level()``, of any thread."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def is_inside_functorch_transform() -> bool:
    """True if ``vmap``, ``grad`` or another transform of ``torch.func`` runs in this thread."""
    return _functorch_interpreter() is not None


# ---- classes, compiled functions, the profiler, builds ---------------------------------------------------------------

disabled_torch_function = private("torch._C._disabled_torch_function_impl", "have fast operators on parameters")
ScriptMethod = private("torch._C.ScriptMethod", "recognise methods of ScriptModules")
pytree = private("torch.utils._pytree", "walk containers that users have registered with torch")
private("torch.autograd.profiler._is_profiler_enabled", "name ranges in profiles")
UnsupportedFakeTensor = private("torch._subclasses.UnsupportedFakeTensorException", "leave graphs", RuntimeError)
_set_strategy = private("torch._C._dynamo.eval_frame.set_code_exec_strategy", "keep the compiler out")
_Strategy = private("torch._C._dynamo.eval_frame._FrameExecStrategy", "keep the compiler out")
_actions = private("torch._C._dynamo.eval_frame._FrameAction", "keep the compiler out")


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


def not_traced(function: F) -> F:
    """Keeps ``torch.compile`` out of a function and out of all that it calls. Returns the same function.

    It decorates what a compiled function may call: the graph ends before the call, and another one begins after it. It
    also decorates what torch calls by itself (``backward``, hooks, operators of tensor subclasses): while a compiled
    function waits for ``loss.backward()``, the compiler would compile each of them. It is ``torch.compiler.disable``
    without a frame around the function, and imports no compiler, which would take seconds.
    """
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
    if isinstance(function, FunctionType):
        _set_strategy(function.__code__, _Strategy(_actions.SKIP, getattr(_actions, what_it_calls)))


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
        _was_compiler_in_use = any(backend is not None for backend in list(of_compiler("backends").values()))
    return _was_compiler_in_use


_OF_COMPILER: dict[str, tuple[Any, ...]] = {
    # A decorator that disables the compiler has the backend None.
    "backends": ("torch._dynamo.eval_frame.cached_backends", "see whether anything is compiled"),
    "module": ("torch._dynamo.eval_frame.OptimizedModule", "recognise modules that torch.compile has made"),
    "context": ("torch._dynamo.eval_frame._TorchDynamoContext", "compile replicas as the module was compiled"),
    "counters": ("torch._dynamo.utils.counters", "count what could not be compiled"),
    "config": ("torch._dynamo.config", "raise the number of graphs for several devices"),
    "functorch": ("torch._functorch.config", "compile a backward together with its forward"),
    "inductor": ("torch._inductor.config", "see what is recorded as CUDA graphs, and refuse parameters inside graphs"),
}


@cache
def of_compiler(name: str) -> Any:
    """A part of the compiler. It is looked up when it is needed, because importing the compiler takes seconds."""
    return private(*_OF_COMPILER[name])


ORIGINAL_OF_COMPILED = "_orig_mod"
"""The name of the module as a child of the one that ``torch.compile`` has made from it."""


def compiled_original(item: Any) -> Any:
    """The module or function from which ``torch.compile`` made ``item``; ``None`` if it did not make it."""
    if not is_compiler_loaded():
        return None
    if issubclass(type(item), of_compiler("module")):
        return vars(item).get("_modules", {}).get(ORIGINAL_OF_COMPILED)
    if type(item) is FunctionType and not vars(item).get("_torchdynamo_disable", False):
        return vars(item).get("_torchdynamo_orig_callable")
    return None


# ---- attributes of modules -------------------------------------------------------------------------------------------

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module keeps parameters, buffers and children."""

OWN_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps hooks by number. A ``forward`` may register hooks."""

HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Attributes in which a module keeps, by the hook's number, how some hooks are called. Each hook has its own number."""

HOOK_TABLES = (*OWN_HOOK_TABLES, *HOOK_FLAGS)
"""All attributes that ``register_*_hook`` writes to."""
