"""`parallel_apply` runs each replica on its device, and returns the outputs in slot order or raises the first error.

``threads.gang`` and ``threads.in_turn`` run the calls, and ``threads.settings`` gives them the caller's settings. This
file decides which replicas may run at the same time, if they need worker threads, and which error is raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.batches.structures import tensors_in
from dataparallel.call.error_hints import hint_of
from dataparallel.devices import CPU, DeviceLike, current_device, resolve, resolve_slots
from dataparallel.environment import says_no
from dataparallel.profiling import in_ranges
from dataparallel.replicas.compiled.gate import gate
from dataparallel.replicas.plan import HAS_COMPILED
from dataparallel.threads.balance import BalancedCall
from dataparallel.threads.gang import Gang
from dataparallel.threads.in_turn import SerialTasks
from dataparallel.threads.meetings import Meeting, is_wake_up
from dataparallel.threads.permits import CallPermits, PermitChooser, kind_of_call, size_of
from dataparallel.threads.pool import Outcome, Skipped
from dataparallel.threads.settings import CallerState

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
        ValueError: lengths that disagree, devices of several types, ``workers`` below 1.
        RuntimeError: a functorch transform, a CUDA graph capture or a jit trace is running around the call.
        Exception: the first error of a replica in slot order. It is the object that was raised, with a note that names
            the replica and its device. Every other replica has ended by then.
        KeyboardInterrupt: Ctrl-C. No further replica starts, and the exception is raised when the running replicas have
            ended; a replica in the calling thread is interrupted. A second Ctrl-C is raised at once, and abandons
            replicas in other threads. Only a second one ends a call in which a replica waits, without a collective of
            ``peers``, for a replica that has not started.
    """
    return run_replicas(modules, inputs, kwargs_tup, devices, workers=workers, serial=serial)


def run_replicas(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None,
    devices: Sequence[DeviceLike | None] | None,
    *,
    workers: int | None = None,
    serial: bool | None = None,
    chooser: PermitChooser | None = None,
    method: str = CALL,
    balanced: BalancedCall | None = None,
    output_functions: Sequence[Callable[[Any], Any]] | None = None,
    machines: Any = None,
) -> list[Any]:
    """`parallel_apply`, for wrappers.

    Args:
        chooser: chooses how many replicas run at the same time, unless ``workers`` says so or only one can.
        method: the name of the method that is called; `CALL` is the module itself, with its hooks.
        balanced: the call whose replicas may have to be timed, with ``chunk_sizes="balanced"``.
        output_functions: a function for each replica. It runs in the replica's thread, and its result replaces the
            output.
        machines: the ``machines.peer_rounds.PeerCall`` of a form that spans machines: replicas meet through it.
    """
    if not modules:
        raise ValueError("parallel_apply needs at least one module; got none")
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    for name, found in (("inputs", inputs), ("kwargs_tup", keywords), ("devices", devices)):
        if found is not None and len(found) != len(modules):
            raise ValueError(f"got {len(modules)} modules but {len(found)} {name}; pass one for each module")
    check_workers(workers)
    if devices is None or any(device is None for device in devices):
        devices = _devices_of(inputs, keywords, devices or [None] * len(modules))
    slots = resolve_slots(cast("Sequence[DeviceLike]", devices))
    arguments = [args if isinstance(args, (tuple, list)) else (args,) for args in inputs]
    calls: list[Callable[[], Any]] = [
        partial(_callable_of(module, method), *args, **kwargs)
        for module, args, kwargs in zip(modules, arguments, keywords, strict=True)
    ]
    if output_functions is not None:
        calls = [partial(_composed, call, function) for call, function in zip(calls, output_functions, strict=True)]
    meeting = Meeting(slots, machines, is_serial(serial))
    _torch.trace_branches_by(gate.run_alone)
    if len(calls) > 1 or machines is not None:  # otherwise the only replica meets no other
        calls = [partial(meeting.run_replica, slot, call) for slot, call in enumerate(calls)]
    times = None if balanced is None else balanced.measures(slots)
    if times is not None:
        calls = [partial(times.run_replica, slot, call) for slot, call in enumerate(calls)]
    calls = [*in_ranges(calls, slots)]
    state = CallerState(slots)
    permits, groups = (1, None) if meeting.is_serial else _permits_and_groups(modules[0], slots, state, workers)
    if times is not None:
        times.begin_call(state.streams, zip(arguments, keywords, strict=True))
    if balanced is not None:
        balanced.runs_with(permits, groups)
    if permits == 1:
        tasks, worker_tasks = (_tasks(run, calls) for run in (state.run_here, state.run_in_worker))
        meeting.scheduler = SerialTasks(tasks, worker_tasks, devices=slots)
        outcomes = meeting.scheduler.run_tasks()
    elif chooser is None or workers is not None or (times is not None and slots[0] != CPU):
        # A replica that is timed waits for its device, so all replicas have to run at the same time.
        # Code is compiled for a number of intra-op threads, so for compiled code it does not depend on the permits.
        divisor = workers if workers is not None and _has_compiled(modules[0]) else permits
        with state.intra_op_threads_divided(divisor):
            tasks = _tasks(state.run_in_worker, calls)
            meeting.scheduler = Gang(tasks, permits, groups, devices=slots)
            outcomes = meeting.scheduler.run_tasks()
    else:
        has_compiled = _has_compiled(modules[0])
        kind = kind_of_call(modules[0], slots)
        size = size_of(arguments[0], keywords[0]) if balanced is None else balanced.size
        call = chooser.begin_call(kind, size, permits, first_in_turn=has_compiled, fixed=times is not None)
        if balanced is not None:
            balanced.runs_with(call.permits, groups)
        divisor = chooser.largest if has_compiled else call.permits
        outcomes = _run_with_permits(chooser, call, calls, permits, groups, state, divisor, meeting)
    if any(outcome.error is not None for outcome in outcomes):
        raise _first_error(outcomes, slots, modules)
    if times is not None:
        times.end_call()
    return [outcome.value for outcome in outcomes]


def check_workers(workers: int | None) -> None:
    """Raises ``TypeError`` if ``workers`` is no int, and ``ValueError`` if it is below 1."""
    if workers is not None and not hasattr(workers, "__index__"):
        raise TypeError(f"workers={workers!r}: expected the number of replicas that run at a time, or None")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: at least 1 replica has to run")


def is_serial(serial: bool | None) -> bool:
    """True if replicas run in the calling thread. The argument ``serial`` decides, or else the environment."""
    if serial is not None:
        return serial
    return bool(os.environ.get(SERIAL_VARIABLE)) and not says_no(SERIAL_VARIABLE)


def _tasks(run: Callable[[int, Callable[[], Any]], Any], calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Returns a task for each of ``calls``. ``run``, a method of `CallerState`, makes the call in the task."""
    return [partial(run, slot, call) for slot, call in enumerate(calls)]


def _run_with_permits(
    chooser: PermitChooser,
    call: CallPermits,
    calls: Sequence[Callable[[], Any]],
    at_once: int,
    groups: Sequence[Hashable | None] | None,
    state: CallerState,
    divisor: int,
    meeting: Meeting,
) -> list[Outcome]:
    """Runs ``calls`` with the chosen permits, and tells the chooser how long they took.

    Each replica has as many intra-op threads as the caller, divided by ``divisor``.
    """
    worker_tasks, slots = _tasks(state.run_in_worker, calls), state.slots
    # `SerialTasks` has no groups: after a stall all tasks run at the same time.
    if call.permits == 1 and at_once == len(slots):
        caller_tasks = _tasks(state.run_here, calls)
        scheduler: SerialTasks | Gang = SerialTasks(caller_tasks, worker_tasks, call.stall_timeout, slots)
    else:
        scheduler = Gang(worker_tasks, call.permits, groups, call.stall_timeout, slots)
    meeting.scheduler = scheduler
    seconds, after, turns = None, None, gate.turns
    before = chooser.marks(call, state.streams)
    try:
        start = time.perf_counter()
        with state.intra_op_threads_divided(divisor, here=isinstance(scheduler, SerialTasks)):
            outcomes = scheduler.run_tasks()
        if all(outcome.error is None for outcome in outcomes) and gate.turns == turns and not gate.is_taken:
            seconds, after = time.perf_counter() - start, chooser.marks(call, state.streams)
        return outcomes
    finally:
        chooser.end_call(call, seconds, scheduler.stalled, before, after)


def _callable_of(module: Any, method: str) -> Callable[..., Any]:
    """Returns the module or its method. A compiled ``forward`` is called through the module, which has no hooks."""
    if method == CALL or (method == "forward" and module._compiled_call_impl is not None):
        result: Callable[..., Any] = module
    else:
        result = getattr(module, method)
    return result


def _composed(call: Callable[[], Any], function: Callable[[Any], Any]) -> Any:
    return function(call())


def _has_compiled(module: Any) -> bool:
    """True if the replica calls compiled code."""
    return isinstance(module, nn.Module) and HAS_COMPILED in vars(module)


def _devices_of(
    inputs: Sequence[Any], keywords: Sequence[dict[str, Any]], given: Sequence[DeviceLike | None]
) -> list[DeviceLike]:
    """Returns the device of each slot: the given one, the first tensor's, or the current device of the same type."""
    found: list[DeviceLike | None] = []
    for args, kwargs, device in zip(inputs, keywords, given, strict=True):
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
    if not (torch.is_grad_enabled() or _is_training(module)):
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
            _note(first, f"replica {other} on device {slots[other]} raised {type(error).__name__} too{_message(error)}")
    try:
        return first
    finally:
        del first, failed, originals


def _is_training(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(getattr(child, "training", False) for child in module.modules())


def _message(error: BaseException) -> str:
    try:
        return f": {error}"
    except Exception:  # the error's __str__ raises, so the note has its type only
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
