"""Which of the caller's settings a replica sees, and how.

Much of what torch calls a setting belongs to a thread. A replica runs in another thread and must not notice, so here
is a table of those settings, a row each: *carried* as they are, *translated* to the slot, *refused* because another
thread cannot take part; what is the same for all threads already is listed too, to be looked up and tested.
``caller_state`` reads the table in the calling thread and holds it around each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from dataparallel import _torch
from dataparallel.devices import current_device_set
from dataparallel.streams.current import current_streams

__all__ = [
    "CARRIED",
    "CURRENT_STREAM",
    "GLOBAL_ALREADY",
    "INTRA_OP_THREADS",
    "ORDERED",
    "REFUSED",
    "TRANSLATED",
    "Setting",
    "carry",
    "refuse_what_cannot_be_shared",
]

T = TypeVar("T")


End: TypeAlias = "Callable[[], object] | None"


@dataclass(frozen=True)
class Setting:
    """One row: ``read(slots)`` in the caller gives a value; ``hold(value, slots, device)`` makes it so in a replica.

    ``hold`` returns what ends it, or ``None`` where nothing has to be ended. ``restore(value)`` makes it so again in
    the caller's thread, where a replica may have left another one.
    """

    name: str
    read: Callable[[Sequence[torch.device]], Any]
    hold: Callable[[Any, Sequence[torch.device], torch.device], End]
    restore: Callable[[Any], object] | None = None


def _entered(context: AbstractContextManager[Any]) -> End:
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def _switch(name: str, read: Callable[[], Any], switch: Callable[[Any], Any]) -> Setting:
    """A setting that is one value with a getter and a setter."""

    def hold(value: Any, slots: Sequence[torch.device], device: torch.device) -> End:
        before = read()
        if before == value:
            return None
        switch(value)
        return lambda: switch(before)

    def restore(value: Any) -> None:
        if read() != value:
            switch(value)

    return Setting(name, lambda slots: read(), hold, restore)


def _hold_inference_mode(value: bool, slots: Sequence[torch.device], device: torch.device) -> End:
    return None if value == torch.is_inference_mode_enabled() else _entered(torch.inference_mode(value))


def _read_autocast(slots: Sequence[torch.device]) -> tuple[bool, list[tuple[str, bool, torch.dtype]]]:
    return torch.is_autocast_cache_enabled(), [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _torch.autocast_device_types()
    ]


def _set_autocast(value: tuple[bool, list[tuple[str, bool, torch.dtype]]]) -> None:
    cache, per_type = value
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in per_type:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _restore_autocast(value: tuple[bool, list[tuple[str, bool, torch.dtype]]]) -> None:
    if _read_autocast(()) != value:
        _set_autocast(value)


def _hold_autocast(value: Any, slots: Sequence[torch.device], device: torch.device) -> End:
    before = _read_autocast(slots)
    if before == value:
        return None
    _set_autocast(value)
    # Weights that were cast are remembered until the outermost autocast of the thread ends: be that one.
    torch.autocast_increment_nesting()

    def end() -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_autocast(before)

    return end


def _hold_function_modes(modes: Sequence[Any], slots: Sequence[torch.device], device: torch.device) -> End:
    for mode in modes:
        _torch.push_function_mode(mode)
    return lambda: [_torch.pop_function_mode() for _ in modes]


def _hold_dispatch_modes(modes: Sequence[Any], slots: Sequence[torch.device], device: torch.device) -> End:
    return _torch.push_dispatch_modes(modes)


def _read_torch_function(slots: Sequence[torch.device]) -> str:
    if _torch.is_torch_function_all_disabled():
        return "disabled"
    return "enabled" if _torch.is_torch_function_enabled() else "disabled for subclasses"


def _hold_torch_function(value: str, slots: Sequence[torch.device], device: torch.device) -> End:
    if value == _read_torch_function(slots):
        return None
    return _entered(_torch.DisableTorchFunction() if value == "disabled" else _torch.DisableTorchFunctionSubclass())


def _read_saved_tensor_hooks(slots: Sequence[torch.device]) -> tuple[Any, str | None]:
    return (
        _torch.top_saved_tensors_hooks(True),
        _torch.why_saved_tensors_hooks_are_disabled(),
    )


def _hold_saved_tensor_hooks(value: Any, slots: Sequence[torch.device], device: torch.device) -> End:
    # Only the innermost pair is ever called, so it alone has to come along.
    hooks, why_disabled = value
    if hooks is not None:
        _torch.push_saved_tensors_hooks(*hooks)
    if why_disabled is not None:
        _torch.disable_saved_tensors_hooks(why_disabled)

    def end() -> None:
        if why_disabled is not None:
            _torch.enable_saved_tensors_hooks()
        if hooks is not None:
            _torch.pop_saved_tensors_hooks()

    return end


INTRA_OP_THREADS = "intra-op threads"


def _set_intra_op_threads(value: int) -> None:
    if torch.get_num_threads() != value:
        torch.set_num_threads(value)


def _hold_intra_op_threads(value: int, slots: Sequence[torch.device], device: torch.device) -> End:
    _set_intra_op_threads(value)
    return None  # the thread may keep it: the next call says anew


CARRIED: tuple[Setting, ...] = (
    # Inference mode changes grad mode, so it comes first.
    Setting("inference mode", lambda slots: torch.is_inference_mode_enabled(), _hold_inference_mode),
    _switch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _switch("forward-mode gradients", _torch.is_fwd_grad_enabled, _torch.set_fwd_grad_enabled),
    _switch("multithreaded backward", _torch.is_multithreading_enabled, _torch.set_multithreading_enabled),
    _switch("view replay", _torch.is_view_replay_enabled, _torch.set_view_replay_enabled),
    Setting("autocast", _read_autocast, _hold_autocast, _restore_autocast),
    Setting("torch function", _read_torch_function, _hold_torch_function),
    Setting(
        "torch function modes",
        lambda slots: [mode for mode in _torch.function_modes() if not _torch.is_device_context(mode)],
        _hold_function_modes,
    ),
    Setting(
        "torch dispatch modes",
        lambda slots: _torch.dispatch_modes(),
        _hold_dispatch_modes,
    ),
    Setting("saved-tensor hooks", _read_saved_tensor_hooks, _hold_saved_tensor_hooks),
    Setting(INTRA_OP_THREADS, lambda slots: torch.get_num_threads(), _hold_intra_op_threads, _set_intra_op_threads),
)
"""Settings of the calling thread that replicas see as they are. Context variables are carried too, by `CallerState`.

Replicas on CPU slots that run at the same time divide the intra-op threads: `CallerState.intra_op_threads_divided`.
"""


def carry(setting: Setting) -> None:
    """Adds a row to `CARRIED`, for thread-local state of another library that modules use in ``forward``."""
    global CARRIED
    CARRIED = (*CARRIED, setting)


ORDERED = frozenset({"torch function modes", "torch dispatch modes", "saved-tensor hooks"})
"""Carried objects with a state of their own, which would be called from several replicas at once."""


def _default_device(slots: Sequence[torch.device]) -> torch.device | None:
    return next((m.device for m in reversed(_torch.function_modes()) if _torch.is_device_context(m)), None)


def _hold_default_device(value: torch.device | None, slots: Sequence[torch.device], device: torch.device) -> End:
    if value is None:
        return None
    # A default without an index means the current device, which is the slot's already.
    return _hold_function_modes([_torch.DeviceContext(device if value == slots[0] else value)], slots, device)


CURRENT_STREAM = "current stream"


def _hold_stream(value: dict[torch.device, torch.Stream], slots: Sequence[torch.device], device: torch.device) -> End:
    if device not in value:
        return None
    # Set, not entered: the stream object keeps what it was entered over, and several replicas would share it.
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(value[device])
    return lambda: torch.accelerator.set_stream(before)


TRANSLATED: tuple[Setting, ...] = (
    Setting("current device", lambda slots: None, lambda value, slots, device: _entered(current_device_set(device))),
    Setting(CURRENT_STREAM, current_streams, _hold_stream),
    Setting("default device", _default_device, _hold_default_device),
)
"""Settings that mean something else in each slot: its device, the caller's current stream there or the slot's own."""

GLOBAL_ALREADY: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("default dtype", torch.get_default_dtype),
    ("anomaly mode", torch.is_anomaly_enabled),
    ("deterministic algorithms", torch.are_deterministic_algorithms_enabled),
    ("float32 matmul precision", torch.get_float32_matmul_precision),
    ("flash attention", torch.backends.cuda.flash_sdp_enabled),
    ("memory-efficient attention", torch.backends.cuda.mem_efficient_sdp_enabled),
    ("math attention", torch.backends.cuda.math_sdp_enabled),
    ("cuDNN", lambda: torch.backends.cudnn.enabled),
    ("cuDNN benchmark", lambda: torch.backends.cudnn.benchmark),
)
"""Settings of the process: nothing has to be done for them."""


def _capturing_cuda_graph() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


REFUSED: tuple[tuple[str, Callable[[], bool], str], ...] = (
    (
        "functorch transform",
        _torch.is_inside_functorch_transform,
        "a torch.func transform (vmap, grad, jvp, functionalize) is running around the call, and exists in its thread "
        "only. Apply the transform inside the module's forward, or call the module that is not wrapped",
    ),
    (
        "CUDA graph capture",
        _capturing_cuda_graph,
        "a CUDA graph is being captured around the call, and one capture cannot follow several threads. Capture the "
        "module that is not wrapped",
    ),
    (
        "jit trace",
        lambda: bool(torch.jit.is_tracing()),  # type: ignore[attr-defined]
        "torch.jit.trace is running around the call, and sees its own thread only. Trace the module without wrapper",
    ),
)
"""What cannot be extended to other threads: a name, whether it is so now, and the sentence with which it is refused."""


def refuse_what_cannot_be_shared() -> None:
    """Raises ``RuntimeError`` with the sentence of the first row of `REFUSED` that holds in the calling thread."""
    for _, holds, sentence in REFUSED:
        if holds():
            raise RuntimeError(f"replicas cannot run here: {sentence}")
