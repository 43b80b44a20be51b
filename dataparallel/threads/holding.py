"""How each setting of a thread is read in the caller, held in a replica's thread, and restored in the caller's.

``settings`` is the table that names these functions, and `Setting` says what they do. Nobody else calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dataparallel import _torch

Slots: TypeAlias = Sequence[torch.device]
End: TypeAlias = "Callable[[], object] | None"


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        name: the setting's name.
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


def switch(name: str, get: Callable[[], Any], set_: Callable[[Any], Any]) -> Setting:
    """The row of a setting that is one value with a getter and a setter."""

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


def entered(context: AbstractContextManager[Any]) -> End:
    """Enters ``context``; the result leaves it."""
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def hold_inference_mode(value: bool, slots: Slots, device: torch.device) -> End:
    return None if value == torch.is_inference_mode_enabled() else entered(torch.inference_mode(value))


# The cache's switch, and for each type of device the name, the switch and the dtype.
Autocast: TypeAlias = tuple[bool, list[tuple[str, bool, torch.dtype]]]


def read_autocast(slots: Slots) -> Autocast:
    return torch.is_autocast_cache_enabled(), [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _torch.autocast_device_types()
    ]


def _set_autocast(value: Autocast) -> None:
    cache, per_type = value
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in per_type:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def restore_autocast(value: Autocast) -> None:
    if read_autocast(()) != value:
        _set_autocast(value)


def hold_autocast(value: Autocast, slots: Slots, device: torch.device) -> End:
    before = read_autocast(slots)
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


def read_function_modes(slots: Slots) -> list[Any]:
    return [mode for mode in _torch.function_modes() if not _torch.is_device_context(mode)]


def hold_function_modes(modes: Sequence[Any], slots: Slots, device: torch.device) -> End:
    for mode in modes:
        _torch.push_function_mode(mode)
    return lambda: [_torch.pop_function_mode() for _ in modes]


def read_dispatch_modes(slots: Slots) -> list[Any]:
    return _torch.dispatch_modes()


def hold_dispatch_modes(modes: Sequence[Any], slots: Slots, device: torch.device) -> End:
    return _torch.push_dispatch_modes(modes)


def read_torch_function(slots: Slots) -> str:
    if _torch.is_torch_function_all_disabled():
        return "disabled"
    return "enabled" if _torch.is_torch_function_enabled() else "disabled for subclasses"


def hold_torch_function(value: str, slots: Slots, device: torch.device) -> End:
    if value == read_torch_function(slots):
        return None
    return entered(_torch.DisableTorchFunction() if value == "disabled" else _torch.DisableTorchFunctionSubclass())


def read_saved_tensor_hooks(slots: Slots) -> tuple[Any, str | None]:
    # torch calls the innermost pair of hooks only, so only that pair is carried.
    return _torch.top_saved_tensors_hooks(True), _torch.why_saved_tensors_hooks_are_disabled()


def hold_saved_tensor_hooks(value: tuple[Any, str | None], slots: Slots, device: torch.device) -> End:
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


def set_threads(value: int) -> None:
    if torch.get_num_threads() != value:
        torch.set_num_threads(value)


def hold_threads(value: int, slots: Slots, device: torch.device) -> End:
    set_threads(value)
    return None  # not ended: each call sets the worker's number again


def read_default_device(slots: Slots) -> torch.device | None:
    return next((m.device for m in reversed(_torch.function_modes()) if _torch.is_device_context(m)), None)


def hold_default_device(value: torch.device | None, slots: Slots, device: torch.device) -> End:
    if value is None:
        return None
    # A default device without an index means the current device, which is the slot's already.
    return hold_function_modes([_torch.DeviceContext(device if value == slots[0] else value)], slots, device)


def hold_stream(value: dict[torch.device, torch.Stream], slots: Slots, device: torch.device) -> End:
    if device not in value:
        return None
    # Set, not entered: the stream object stores the stream that it was entered over, and replicas would share it.
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(value[device])
    return lambda: torch.accelerator.set_stream(before)
