"""The caller's settings that replicas see. Much of what torch calls a setting belongs to a thread.

*Carried* settings are the same in replicas, *translated* ones depend on the slot, *refused* ones cannot be extended to
other threads. Settings of the process need no row in these tables. `CallerState` reads them once for each call.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from dataparallel import _torch
from dataparallel.comm.streams.current import current_streams
from dataparallel.devices import current_device_set

T = TypeVar("T")

INTRA_OP_THREADS = "intra-op threads"

Slots: TypeAlias = Sequence[torch.device]
End: TypeAlias = "Callable[[], object] | None"


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        read: ``read(slots)`` returns the value in the calling thread.
        hold: ``hold(value, slots, device)`` sets the value in the thread of the replica on ``device``. It returns the
            function that ends it, or ``None`` if nothing has to be ended.
        restore: ``restore(value)`` sets the value in the calling thread again, where a replica may have changed it.
        one_at_a_time: true if replicas must not use the value at the same time, because it is an object with a state.
    """

    name: str
    read: Callable[[Slots], Any]
    hold: Callable[[Any, Slots, torch.device], End]
    restore: Callable[[Any], object] | None = None
    one_at_a_time: bool = False


def _switch(name: str, get: Callable[[], Any], set_: Callable[[Any], Any]) -> Setting:

    def hold(value: Any, slots: Slots, device: torch.device) -> End:
        before = get()
        if before == value:
            return None
        set_(value)
        return lambda: set_(before)

    def restore(value: Any) -> None:
        if get() != value:
            set_(value)

    return Setting(name, lambda slots: get(), hold, restore)


def _entered(context: AbstractContextManager[Any]) -> End:
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def _context(name: str, get: Callable[[], Any], make: Callable[[Any], AbstractContextManager[Any]]) -> Setting:

    def hold(value: Any, slots: Slots, device: torch.device) -> End:
        return None if value == get() else _entered(make(value))

    return Setting(name, lambda slots: get(), hold)


# The cache's switch, and for each type of device the name, the switch and the dtype.
_Autocast: TypeAlias = tuple[bool, list[tuple[str, bool, torch.dtype]]]


def _read_autocast(slots: Slots) -> _Autocast:
    return torch.is_autocast_cache_enabled(), [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _torch.autocast_device_types()
    ]


def _set_autocast(value: _Autocast) -> None:
    cache, per_type = value
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in per_type:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _restore_autocast(value: _Autocast) -> None:
    if _read_autocast(()) != value:
        _set_autocast(value)


def _hold_autocast(value: _Autocast, slots: Slots, device: torch.device) -> End:
    before = _read_autocast(slots)
    if before == value:
        return None
    _set_autocast(value)
    # torch caches casts of weights until the thread's outermost autocast ends. This makes the replica the outermost.
    torch.autocast_increment_nesting()

    def end() -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_autocast(before)

    return end


def _read_function_modes(slots: Slots) -> list[Any]:
    return [mode for mode in _torch.function_modes() if not _torch.is_device_context(mode)]


def _hold_function_modes(modes: Sequence[Any], slots: Slots, device: torch.device) -> End:
    for mode in modes:
        _torch.push_function_mode(mode)
    return lambda: [_torch.pop_function_mode() for _ in modes]


def _torch_function() -> str:
    if _torch.is_torch_function_all_disabled():
        return "disabled"
    return "enabled" if _torch.is_torch_function_enabled() else "disabled for subclasses"


def _without_torch_function(how: str) -> AbstractContextManager[Any]:
    disabled = _torch.DisableTorchFunction if how == "disabled" else _torch.DisableTorchFunctionSubclass
    context: AbstractContextManager[Any] = disabled()
    return context


def _read_saved_tensor_hooks(slots: Slots) -> tuple[Any, str | None]:
    # torch calls the innermost pair of hooks only, so only that pair is carried.
    return _torch.top_saved_tensors_hooks(True), _torch.why_hooks_are_disabled()


def _hold_saved_tensor_hooks(value: tuple[Any, str | None], slots: Slots, device: torch.device) -> End:
    hooks, why_disabled = value
    if hooks is None and why_disabled is None:
        return None
    ends = ExitStack()
    if hooks is not None:
        ends.enter_context(saved_tensors_hooks(*hooks))
    if why_disabled is not None:
        ends.enter_context(disable_saved_tensors_hooks(why_disabled))
    return ends.close


def _set_threads(value: int, *_: object) -> None:
    if torch.get_num_threads() != value:
        torch.set_num_threads(value)


def _read_default_device(slots: Slots) -> torch.device | None:
    return next((m.device for m in reversed(_torch.function_modes()) if _torch.is_device_context(m)), None)


def _hold_default_device(value: torch.device | None, slots: Slots, device: torch.device) -> End:
    if value is None:
        return None
    # A default device without an index means the current device, which is the slot's already.
    return _hold_function_modes([_torch.DeviceContext(device if value == slots[0] else value)], slots, device)


def _hold_stream(value: dict[torch.device, torch.Stream], slots: Slots, device: torch.device) -> End:
    if device not in value:
        return None
    # Set, not entered: the stream object stores the stream that it was entered over, and replicas would share it.
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(value[device])
    return lambda: torch.accelerator.set_stream(before)


def _read_waits(slots: Slots) -> Any:
    watcher = sys.modules.get("nogpu.host_threads")
    return None if watcher is None else watcher.known_here()


def _hold_waits(value: Any, slots: Slots, device: torch.device) -> End:
    return None if value is None else sys.modules["nogpu.host_threads"].known_there(value)


CARRIED: tuple[Setting, ...] = (
    # Inference mode changes grad mode, so it comes first.
    _context("inference mode", torch.is_inference_mode_enabled, torch.inference_mode),
    _switch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _switch("forward-mode gradients", _torch.is_fwd_grad_enabled, _torch.set_fwd_grad_enabled),
    _switch("multithreaded backward", _torch.is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
    _switch("view replay", _torch.is_view_replay_enabled, _torch.set_view_replay_enabled),
    Setting("autocast", _read_autocast, _hold_autocast, _restore_autocast),
    _context("torch function", _torch_function, _without_torch_function),
    Setting("torch function modes", _read_function_modes, _hold_function_modes, one_at_a_time=True),
    Setting(
        "torch dispatch modes",
        lambda slots: _torch.dispatch_modes(),
        lambda modes, slots, device: _torch.push_dispatch_modes(modes),
        one_at_a_time=True,
    ),
    Setting("saved-tensor hooks", _read_saved_tensor_hooks, _hold_saved_tensor_hooks, one_at_a_time=True),
    # It is not ended: each call sets the worker's number again.
    Setting(INTRA_OP_THREADS, lambda slots: torch.get_num_threads(), _set_threads, _set_threads),
    # Devices without hardware raise for memory that nobody has waited for. A replica may use what its caller may.
    Setting("what the host has waited for", _read_waits, _hold_waits),
)
"""Settings of the calling thread that are the same in replicas. `CallerState` carries context variables too."""


TRANSLATED: tuple[Setting, ...] = (
    Setting("current device", lambda slots: None, lambda value, slots, device: _entered(current_device_set(device))),
    Setting("current stream", current_streams, _hold_stream),
    Setting("default device", _read_default_device, _hold_default_device),
)
"""Settings that depend on the slot: its device, and the caller's current stream there."""


REFUSED: tuple[tuple[str, Callable[[], bool], str], ...] = (
    (
        "functorch transform",
        _torch.is_inside_functorch_transform,
        "a torch.func transform (vmap, grad, jvp, functionalize) is running around the call, and exists in its thread "
        "only. Apply the transform inside the module's forward, or call the module that is not wrapped",
    ),
    (
        "forward-mode level",
        _torch.is_in_dual_level,
        "torch.autograd.forward_ad.dual_level() is active, and the tangents of parameters and inputs would not reach "
        "the replicas. Take derivatives backwards, or call the module that is not wrapped",
    ),
    (
        "cached parametrizations",
        _torch.are_parametrizations_cached,
        "torch.nn.utils.parametrize.cached() is active, and its cache has one place for the weights of all replicas. "
        "Call the module outside of it: a weight that forward uses several times may be kept in a variable there",
    ),
    (
        "CUDA graph capture",
        lambda: torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing(),
        "a CUDA graph is being captured around the call, and one capture cannot follow several threads. Capture the "
        "module that is not wrapped",
    ),
    (
        "jit trace",
        lambda: bool(torch.jit.is_tracing()),  # type: ignore[attr-defined]
        "torch.jit.trace is running around the call, and sees its own thread only. Trace the module without wrapper",
    ),
    (
        "export",
        torch.compiler.is_exporting,
        "torch.export is running around the call, and an exported program runs on the devices of its example. Export "
        "the module without wrapper: the program's module() can be wrapped",
    ),
)
"""States that cannot be extended to other threads: a name, a function that detects it, and the error's sentence."""


def refuse_what_cannot_be_shared() -> None:
    for _, is_true, sentence in REFUSED:
        if is_true():
            raise RuntimeError(f"replicas cannot run here: {sentence}")


class CallerState:
    """The settings of the thread that makes this object, for replicas on ``slots``. The first slot is the root."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        refuse_what_cannot_be_shared()
        self.slots = slots
        self._carried = [(setting, setting.read(slots)) for setting in CARRIED]
        self._translated = [(setting, setting.read(slots)) for setting in TRANSLATED]
        # Two threads cannot enter one context, so each replica has a copy. Values that it sets there are dropped.
        self._contexts = [contextvars.copy_context() for _ in slots]

    @property
    def one_at_a_time(self) -> bool:
        """True if a carried object has a state, which replicas must change one at a time and in slot order."""
        return any(setting.one_at_a_time and value not in ([], (None, None)) for setting, value in self._carried)

    @contextmanager
    def intra_op_threads_divided(self, workers: int) -> Iterator[None]:
        """Divides the caller's intra-op threads among replicas on CPU slots, of which ``workers`` run at a time.

        torch keeps this number for each thread, and gives new threads the number that was set last. Workers set their
        own number. At the end of the block new threads get the caller's number again.
        """
        whole = torch.get_num_threads()
        each = max(1, whole // workers)
        if each == whole or self.slots[0].type != "cpu":
            yield
            return
        self._carried = [(s, each if s.name == INTRA_OP_THREADS else value) for s, value in self._carried]
        try:
            yield
        finally:
            torch.set_num_threads(whole)

    def run_in_worker(self, slot: int, task: Callable[[], T]) -> T:
        """Runs ``task`` in a worker thread, with the caller's settings."""
        try:
            return self._run(slot, task, [*self._translated, *self._carried])
        finally:
            # Modes that the task has left in this thread (``torch.set_default_device``) must not meet its next task.
            for _ in _torch.function_modes():
                _torch.pop_function_mode()
            _torch.forget_default_device_context()

    def run_here(self, slot: int, task: Callable[[], T]) -> T:
        """Settings that the task leaves changed are restored, so that the next replica sees the caller's."""
        default = _torch.default_device_context()
        try:
            return self._run(slot, task, self._translated)
        finally:
            if _torch.default_device_context() is not default:
                torch.set_default_device(None if default is None else default.device)
            for setting, value in self._carried:
                if setting.restore is not None:
                    setting.restore(value)
            if _torch.is_any_autocast_enabled():
                # Otherwise casts of the replica's weights would be cached until the caller's autocast ends.
                torch.clear_autocast_cache()

    def _run(self, slot: int, task: Callable[[], T], held: list[tuple[Setting, Any]]) -> T:
        ends: list[Callable[[], object]] = []
        try:
            for setting, value in held:
                end = setting.hold(value, self.slots, self.slots[slot])
                if end is not None:
                    ends.append(end)
            return self._contexts[slot].run(task)
        finally:
            for end in reversed(ends):
                end()
