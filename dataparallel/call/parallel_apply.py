"""`parallel_apply` runs each replica on its device, and returns the outputs in slot order or raises the first error.

This file says which replicas must not run at the same time, if they need worker threads, which error is raised, and
what to do about one that comes from the split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.arguments import checked
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import current_streams
from dataparallel.devices import DeviceLike, current_device, resolve, resolve_slots
from dataparallel.environment import says_no
from dataparallel.profiling import in_ranges
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.replicas.plan import HAS_COMPILED, UNIT_MODULE
from dataparallel.threads.gang import Gang, SerialTasks
from dataparallel.threads.meetings import Meeting, is_wake_up
from dataparallel.threads.permits import Permits, cores
from dataparallel.threads.pool import Outcome, Skipped
from dataparallel.threads.settings import CallerState

if TYPE_CHECKING:
    from dataparallel.machines.peer_rounds import PeerCall

CALL = "__call__"

SERIAL_VARIABLE = "DATAPARALLEL_SERIAL"
"""Environment variable: ``1`` runs every replica in the calling thread, so that ``breakpoint()`` works."""


@_torch.not_traced
def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
    *,
    workers: int | None = None,
    serial: bool | None = None,
) -> list[Any]:
    """Calls every module with its inputs, each on its own device, and returns the outputs in order.

    Replicas that share a random generator (slots on one device) run one after the other, in slot order, while a graph
    is recorded or a module is in training mode, unless ``workers`` is given. So random draws have a fixed order, and
    checkpointing recomputes with the draws of the forward.

    Args:
        modules: one for each slot.
        inputs: for each slot a tuple or list of positional arguments, or one argument of another type.
        kwargs_tup: for each slot its keyword arguments.
        devices: the slots. Default, also for an entry ``None``: the device of the slot's first input tensor, or the
            current device if there is no tensor.
        workers: how many replicas may run Python at the same time, at least 1. Default: all.
        serial: run in the calling thread, one after the other. Default: true if the environment variable
            ``DATAPARALLEL_SERIAL`` is set, and not to ``0``, ``false``, ``no`` or ``off``.

    Raises:
        TypeError: ``workers`` is no int, or ``serial`` no bool.
        ValueError: lengths that disagree, devices of several types, ``workers`` below 1.
        RuntimeError: a functorch transform, a CUDA graph capture or a jit trace is running around the call.
        Exception: the first error of a replica in slot order. It is the object that was raised, with a note that names
            the replica and its device. Every other replica has ended by then.
        KeyboardInterrupt: Ctrl-C. No further replica starts, and the exception is raised when the running replicas have
            ended; a replica in the calling thread is interrupted. A second Ctrl-C is raised at once, and abandons
            replicas in other threads.
    """
    workers, serial = checked("workers", workers, int, None, above=0), checked("serial", serial, bool, None)
    arguments, keywords, slots = arguments_of_replicas(modules, inputs, kwargs_tup, devices)
    return run_replicas(modules, arguments, keywords, slots, workers=workers, serial=serial)


def arguments_of_replicas(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None,
    devices: Sequence[DeviceLike | None] | None,
) -> tuple[Sequence[Sequence[Any]], Sequence[dict[str, Any]], list[torch.device]]:
    """Returns the positional and the keyword arguments and the slot of each module, from those of `parallel_apply`."""
    if not modules:
        raise ValueError("parallel_apply needs at least one module; got none")
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    for name, found in (("inputs", inputs), ("kwargs_tup", keywords), ("devices", devices)):
        if found is not None and len(found) != len(modules):
            raise ValueError(f"got {len(modules)} modules but {len(found)} {name}; pass one for each module")
    arguments = [args if isinstance(args, (tuple, list)) else (args,) for args in inputs]
    if devices is None or any(device is None for device in devices):
        devices = _devices_of(arguments, keywords, devices or [None] * len(modules))
    return arguments, keywords, resolve_slots(None, cast("Sequence[DeviceLike]", devices))


def run_replicas(
    modules: Sequence[Any],
    arguments: Sequence[Sequence[Any]],
    keywords: Sequence[dict[str, Any]],
    slots: Sequence[torch.device],
    *,
    workers: int | None = None,
    serial: bool | None = None,
    permits: Permits | None = None,
    method: str = CALL,
    peer_call: PeerCall | None = None,
) -> list[Any]:
    """`parallel_apply` for the forms.

    Args:
        permits: says how many replicas run at the same time, unless ``workers`` says so or only one can.
        method: the name of the method that is called; `CALL` is the module itself, with its hooks.
        peer_call: of a form that spans machines: replicas meet through it.
    """
    calls: list[Callable[[], Any]] = [
        partial(_callable_of(module, method), *args, **kwargs)
        for module, args, kwargs in zip(modules, arguments, keywords, strict=True)
    ]
    meeting = Meeting(slots, peer_call, is_serial(serial))
    if len(calls) > 1 or peer_call is not None:  # otherwise the only replica meets no other
        calls = [partial(meeting.run_replica, slot, call) for slot, call in enumerate(calls)]
    calls = [*in_ranges(calls)]
    state = CallerState(slots)
    at_once, groups = (1, None) if meeting.is_serial else _permits_and_groups(modules[0], slots, state, workers)
    worker_tasks = [partial(state.run_in_worker, slot, call) for slot, call in enumerate(calls)]
    if at_once == 1:
        tasks = [partial(state.run_here, slot, call) for slot, call in enumerate(calls)]
        meeting.scheduler = SerialTasks(tasks, worker_tasks, slots)
        outcomes = meeting.scheduler.run_tasks()
    else:
        kind = _kind_of_call(modules[0], arguments[0], keywords[0], method)
        turns = compile_lock.turns
        call, running_at_once, thread_divisor = None, at_once, at_once
        if workers is not None and kind.has_compiled:
            # Code is compiled for a number of intra-op threads, so for compiled code it does not depend on the permits.
            thread_divisor = workers
        elif workers is None and permits is not None:
            training = getattr(modules[0], "training", None)
            call = permits.begin_call(kind, training, at_once, current_streams(slots), kind.has_compiled)
            running_at_once = call.number
            thread_divisor = min(cores(), permits.largest if kind.has_compiled else at_once)
        stall_timeout = None if call is None else call.stall_timeout
        meeting.scheduler = gang = Gang(worker_tasks, running_at_once, groups, stall_timeout, slots)
        with state.intra_op_threads_divided(thread_divisor):
            outcomes = gang.run_tasks()
        # A call in which somebody compiled takes longer than the next one will.
        is_usual = compile_lock.turns == turns and not compile_lock.is_taken
        if permits is not None and call is not None and is_usual and all(outcome.error is None for outcome in outcomes):
            permits.end_call(call, gang.stalled)
    if any(outcome.error is not None for outcome in outcomes):
        raise _first_error(outcomes, slots, modules)
    return [outcome.value for outcome in outcomes]


class _CallKind(NamedTuple):
    """Calls of one kind take about the same way through the code."""

    method: str
    size: Hashable  # of the arguments, for compiled code
    has_compiled: bool
    is_recorded: bool
    is_inference: bool
    has_autocast: bool


def _kind_of_call(module: Any, args: Sequence[Any], kwargs: dict[str, Any], method: str) -> _CallKind:
    has_compiled = isinstance(module, nn.Module) and HAS_COMPILED in vars(module)
    size = _size_of(args, kwargs) if has_compiled else None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _torch.is_any_autocast_enabled()
    return _CallKind(method, size, has_compiled, *modes)


def is_serial(serial: bool | None) -> bool:
    """True if replicas run in the calling thread. The argument ``serial`` decides, or else the environment."""
    if serial is not None:
        return serial
    return bool(os.environ.get(SERIAL_VARIABLE)) and not says_no(SERIAL_VARIABLE)


def _callable_of(module: Any, method: str) -> Callable[..., Any]:
    """Returns the module or its method. Compiled code stands beside ``forward``; in a unit ``forward`` calls it.

    An overridden ``__call__`` runs around ``forward`` where the user calls, and must not run again in the replica.
    """
    calls_forward = method == "forward" and UNIT_MODULE not in vars(module)
    compiled = module._compiled_call_impl if calls_forward else None
    called: Callable[..., Any] = module if method == CALL else compiled or getattr(module, method)
    return called


def _size_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """Numbers are rounded to three binary digits, so batches that are padded to many lengths have few keys."""

    def rounded(count: int) -> int:
        digits = max(0, count.bit_length() - 3)
        return count >> digits << digits

    tensors = islice(tensors_in((args, kwargs)), 8)
    return tuple((tensor.dtype, None if tensor.is_nested else rounded(tensor.numel())) for tensor in tensors)


def _devices_of(
    arguments: Sequence[Any], keywords: Sequence[dict[str, Any]], given: Sequence[DeviceLike | None]
) -> list[DeviceLike]:
    found: list[DeviceLike | None] = []
    for args, kwargs, device in zip(arguments, keywords, given, strict=True):
        tensor = next(tensors_in((args, kwargs)), None) if device is None else None
        found.append(device if tensor is None else tensor.device)
    known = next((resolve(device) for device in found if device is not None), None)
    return [current_device(like=known) if device is None else device for device in found]


def _permits_and_groups(
    module: Any, slots: Sequence[torch.device], state: CallerState, workers: int | None
) -> tuple[int, list[Hashable | None] | None]:
    """Returns how many replicas can run at a time, and each slot's group if some must not run at the same time."""
    if state.one_at_a_time:
        return 1, None
    if workers is not None:
        return min(workers, len(slots)), None
    # In training mode random draws are likely. Their order must be fixed without gradients too: a reentrant checkpoint
    # around the call runs the call first without gradients and then with them, and needs the same draws.
    modules = module.modules() if isinstance(module, nn.Module) else ()
    if not (torch.is_grad_enabled() or any(getattr(child, "training", False) for child in modules)):
        return len(slots), None
    return len({*slots}), list(slots)  # a group for each random generator: every device has one


def _first_error(outcomes: Sequence[Outcome], slots: Sequence[torch.device], modules: Sequence[Any]) -> BaseException:
    """Returns the first original error in slot order, with notes. Removes all errors from ``outcomes``.

    An error holds a traceback, and the traceback holds frames with activations. If these frames could reach the error,
    only the garbage collector would free the memory of a failed call.
    """
    failed = [(slot, outcome.error) for slot, outcome in enumerate(outcomes) if outcome.error is not None]
    for outcome in outcomes:
        outcome.clear()
    originals = [(slot, error) for slot, error in failed if not isinstance(error, Skipped) and not is_wake_up(error)]
    slot, first = (originals or failed)[0]
    hint = hint_of(first, modules[slot], slots[slot])
    _note(first, f"raised in replica {slot} on device {slots[slot]}{f'. {hint}' if hint else ''}")
    for other, error in originals[1:]:
        if error is not first:
            what = f"raised {type(error).__name__} too: {_text_of(error)}"
            _note(first, f"replica {other} on device {slots[other]} {what}")
    try:
        return first
    finally:
        del first, failed, originals


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the error's __str__ raises
        return ""


def _note(error: BaseException, note: str) -> None:
    try:
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10 shows no notes, only causes
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
            if error.__cause__ is None and error.__context__ is None:
                error.__cause__ = RuntimeError(note)
    except Exception:  # an exception that takes no attributes is raised without the note
        return


def hint_of(error: BaseException, module: Any, device: torch.device) -> str | None:
    """Returns what to do about an error that a replica, ``module``, has raised on its device, if that is known."""
    text = _text_of(error)
    if "Expected more than 1 value per channel" in text:
        return (
            "BatchNorm in training needs two values of a channel, and this chunk has one sample. Take a batch with two "
            "samples or more for each slot (DataLoader(..., drop_last=True) for the last one), or statistics of the "
            "whole batch: pass sync_batch_norm=True where you wrap the model"
        )
    if "same device" not in text or not isinstance(module, nn.Module):
        return None
    for path, name, where in _tensors_elsewhere(module, device):
        if str(where) in text:
            return (
                f"The attribute {f'{path}.{name}'.lstrip('.')!r} of the {type(module).__name__} is on {where}: a "
                "tensor in a plain attribute stays where it is. Make it a buffer, which is copied to each device: "
                f"self.register_buffer({name!r}, tensor)"
            )
    return (
        "A tensor that is neither an argument nor a parameter or buffer of this replica is on another device. Make "
        "tensors in forward with device=x.device, and keep others as buffers: self.register_buffer('name', tensor)"
    )


def _tensors_elsewhere(module: nn.Module, device: torch.device) -> Iterator[tuple[str, str, torch.device]]:
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name in (*REGISTRIES, *HOOK_TABLES):
                continue
            held = [*value.values()] if isinstance(value, dict) else value
            held = held if isinstance(held, (list, tuple)) else [held]
            for each in held:
                if isinstance(each, Tensor) and each.device != device:
                    yield path, name, each.device
