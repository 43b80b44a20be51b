"""Run each copy on its device; errors out.

Takes replicas and their inputs and returns their outputs, in slot order. How threads are kept is ``workers``' business,
what they see of the caller's settings ``threads.settings``'s; here they meet, and here it is decided which replicas
may run at the same time, whether they need threads of their own (``threads.in_turn``), and which error is raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.devices import CPU, DeviceLike, current_device, resolve, resolve_slots
from dataparallel.environment import says_no
from dataparallel.profiling import in_range, in_stage, is_recording
from dataparallel.structures import tensors_in
from dataparallel.threads.caller_state import CallerState
from dataparallel.threads.gang import Gang, Outcome, Skipped
from dataparallel.threads.in_turn import InTurn
from dataparallel.threads.permits import PermitChooser, Trial, size_of

__all__ = ["SERIAL_VARIABLE", "parallel_apply", "run_replicas"]

SERIAL_VARIABLE = "DATAPARALLEL_SERIAL"
"""Environment variable: ``1`` runs every replica in the calling thread, so that ``breakpoint()`` works."""


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

    Replicas that share a random generator (slots on one device) run one after the other, in slot order, while gradients
    are recorded or a module is in training mode, unless ``workers`` is given: random draws have a fixed order then, and
    checkpointing recomputes with the draws of the forward.

    Args:
        modules: one for each slot.
        inputs: for each slot a tuple or list of positional arguments, or one argument that is neither.
        kwargs_tup: for each slot its keyword arguments.
        devices: the slots; where there is none, or ``None``, the device of the slot's first input tensor, and without
            one the current device.
        workers: how many replicas may run Python at the same time, at least 1; default: all.
        serial: run in the calling thread, one after the other; default: what the environment variable
            ``DATAPARALLEL_SERIAL`` says, else no.

    Raises:
        ValueError: lengths that disagree, devices of several types, ``workers`` below 1.
        RuntimeError: a functorch transform, a CUDA graph capture or a jit trace is running around the call.
        Exception: the first error of a replica in slot order, the object that was raised, with a note that names the
            replica and its device. Every other replica has ended by then.
        KeyboardInterrupt: Ctrl-C. Nothing more is started, and it is raised when the replicas that run have ended; a
            replica in the calling thread ends where it is. A second one is raised at once and leaves replicas of other
            threads to themselves. Replicas that wait for one that has not started need the second.
    """
    return run_replicas(modules, inputs, kwargs_tup, devices, workers, serial, None)


@in_stage("parallel_apply")
def run_replicas(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None,
    devices: Sequence[DeviceLike | None] | None,
    workers: int | None,
    serial: bool | None,
    chooser: PermitChooser | None,
    method: str | None = None,
) -> list[Any]:
    """`parallel_apply`, with a memory of earlier calls: ``chooser`` chooses how many replicas run at the same time.

    It is not asked where ``workers`` says so, or where only one replica can run at a time. ``method`` is what is run
    of each module, where that is not its call.
    """
    if not modules:
        raise ValueError("parallel_apply needs at least one module; got none")
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    for name, found in (("inputs", inputs), ("kwargs_tup", keywords), ("devices", devices)):
        if found is not None and len(found) != len(modules):
            raise ValueError(f"got {len(modules)} modules but {len(found)} {name}; pass one for each module")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: at least 1 replica has to run")
    if devices is None or any(device is None for device in devices):
        devices = _devices_of(inputs, keywords, devices or [None] * len(modules))
    slots = resolve_slots(cast("Sequence[DeviceLike]", devices))
    arguments = [args if isinstance(args, (tuple, list)) else (args,) for args in inputs]
    state = CallerState(slots)
    for slot, own in state.slot_streams.items():
        own.lend(modules[slot], arguments[slot], keywords[slot])
    try:
        values = _values(_outcomes(modules, arguments, keywords, slots, state, workers, serial, chooser, method), slots)
    finally:
        for own in state.slot_streams.values():
            own.join()
    for slot, own in state.slot_streams.items():
        own.take_back(values[slot])
    return values


def _outcomes(
    modules: Sequence[nn.Module],
    arguments: Sequence[Sequence[Any]],
    keywords: Sequence[dict[str, Any]],
    slots: Sequence[torch.device],
    state: CallerState,
    workers: int | None,
    serial: bool | None,
    chooser: PermitChooser | None,
    method: str | None,
) -> Sequence[Outcome]:
    """What has become of each replica's call; none is running any more."""
    calls: list[Callable[[], Any]] = [
        partial(module if method is None else getattr(module, method), *args, **kwargs)
        for module, args, kwargs in zip(modules, arguments, keywords, strict=True)
    ]
    here = _tasks(state.run_here, calls)
    if serial if serial is not None else os.environ.get(SERIAL_VARIABLE) and not says_no(SERIAL_VARIABLE):
        return InTurn(here).run()
    may_draw = torch.is_grad_enabled() or _is_training(modules[0])
    permits, turns = _who_may_run_together(slots, state, workers, may_draw)
    if permits == 1:
        return InTurn(here).run()
    elsewhere = _tasks(state.run_in_worker, calls)
    if chooser is None or workers is not None:
        with state.intra_op_threads_divided(permits):
            return Gang(elsewhere, permits, turns, homes=slots).run()
    trial = chooser.begin(_kind_of_call(modules[0], slots), size_of(arguments[0], keywords[0]), permits)
    # Workers that take over must be free to run all at once, also beside the replica that waits.
    if trial.permits == 1 and permits == len(slots):
        run: InTurn | Gang = InTurn(here, elsewhere, trial.patience, slots)
    else:
        run = Gang(elsewhere, trial.permits, turns, trial.patience, slots)
    return _run_trial(chooser, trial, run, state)


def _tasks(run: Callable[[int, Callable[[], Any]], Any], calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    tasks: list[Callable[[], Any]] = [partial(run, slot, call) for slot, call in enumerate(calls)]
    if is_recording():
        return [partial(in_range, f"replica {slot}", task) for slot, task in enumerate(tasks)]
    return tasks


def _values(outcomes: Sequence[Outcome], slots: Sequence[torch.device]) -> list[Any]:
    """What the replicas returned; raises the first error."""
    if any(outcome.error is not None for outcome in outcomes):
        raise _first_error(outcomes, slots)
    return [outcome.value for outcome in outcomes]


def _kind_of_call(module: Any, slots: Sequence[torch.device]) -> Hashable:
    """What a choice of permits holds for, beside the size of the inputs."""
    return (
        len(slots),
        getattr(module, "training", None),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _torch.is_any_autocast_enabled(),
        torch.get_num_threads() if slots[0] == CPU else None,
    )


def _run_trial(chooser: PermitChooser, trial: Trial, run: InTurn | Gang, state: CallerState) -> list[Outcome]:
    """Runs what was made for ``trial``, and tells the chooser how long that took."""
    seconds = None
    try:
        # A launch returns before its kernel has run: time counts until the devices have finished.
        streams = state.streams if trial.measured else []
        _synchronize(streams)
        start = time.perf_counter()
        with state.intra_op_threads_divided(trial.permits):
            outcomes = run.run()
        _synchronize(streams)
        if all(outcome.error is None for outcome in outcomes):
            seconds = time.perf_counter() - start
        return outcomes
    finally:
        chooser.end(trial, seconds, run.stalled)


def _synchronize(streams: Iterable[torch.Stream]) -> None:
    for stream in streams:
        stream.synchronize()


def _devices_of(
    inputs: Sequence[Any], keywords: Sequence[dict[str, Any]], given: Sequence[DeviceLike | None]
) -> list[DeviceLike]:
    """The device of each slot: the given one, or that of its first tensor, or the current one of their type."""
    found: list[DeviceLike | None] = []
    for args, kwargs, device in zip(inputs, keywords, given, strict=True):
        tensor = next(tensors_in((args, kwargs)), None) if device is None else None
        found.append(device if tensor is None else tensor.device)
    known = next((resolve(device) for device in found if device is not None), None)
    return [current_device(like=known) if device is None else device for device in found]


def _who_may_run_together(
    slots: Sequence[torch.device], state: CallerState, workers: int | None, may_draw: bool
) -> tuple[int, list[Hashable | None] | None]:
    """How many replicas can run at a time, and a turn for each slot where some must not run at the same time."""
    if state.one_at_a_time:
        return 1, None
    if workers is not None:
        return min(workers, len(slots)), None
    if not may_draw:
        return len(slots), None
    # A turn for each generator: every device has one. Without gradients too where draws are likely: a reentrant
    # checkpoint around the call runs it first without, then with them, and needs the same draws.
    return len({*slots}), list(slots)


def _first_error(outcomes: Sequence[Outcome], slots: Sequence[torch.device]) -> BaseException:
    """The first original error in slot order, annotated; the outcomes let go of it and of all others.

    An error holds its traceback, that holds frames with activations: nothing that these frames can reach may hold the
    error, or what a failed call used would only be freed by the garbage collector.
    """
    failed = [(slot, outcome.error) for slot, outcome in enumerate(outcomes) if outcome.error is not None]
    for outcome in outcomes:
        outcome.value = outcome.error = None
    originals = [(slot, error) for slot, error in failed if not isinstance(error, Skipped)]
    slot, first = (originals or failed)[0]
    _note(first, _where(slot, slots))
    for other, error in originals[1:]:
        if error is not first:
            _note(first, f"replica {other} on device {slots[other]} raised {type(error).__name__} too{_words(error)}")
    try:
        return first
    finally:
        del first, failed, originals


def _where(slot: int, slots: Sequence[torch.device]) -> str:
    return f"raised in replica {slot} on device {slots[slot]}"


def _is_training(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(child.training for child in module.modules())


def _words(error: BaseException) -> str:
    try:
        return f": {error}"
    except Exception:  # its __str__ raises; the type has to do
        return ""


def _note(error: BaseException, note: str) -> None:
    try:
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10 shows no notes, only causes
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
            if error.__cause__ is None and error.__context__ is None:
                error.__cause__ = RuntimeError(note)
    except Exception:  # an exception may refuse attributes; it is raised all the same, as what it is
        return
