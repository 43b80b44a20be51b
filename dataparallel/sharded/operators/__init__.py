"""`run` runs every ATen operator that has a sharded tensor among its arguments, below autograd.

It uses the function in `TABLE`, or the one that a rule has for this kind of operator (pointwise, on lists). If these
need several shards at once, it uses gathered tensors (``gathered``), unless that is refused. The other files fill the
table when ``sharded`` is imported. This file imports none of them, because the tensor's class imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.comm.streams.current import Event, current_streams, streams_joined
from dataparallel.devices import current_device
from dataparallel.forks import in_forked_child

Operator: TypeAlias = Callable[..., Any]
"""A function that runs an operator. Its arguments are the ATen operator, then the arguments of the schema."""

OnWholes: TypeAlias = "Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Exception], Any]"
"""As `Operator`, on gathered tensors. The last argument is the error to raise if tensors may not be gathered."""

TABLE: dict[OpOverload, Operator] = {}
"""The function for each operator. Functions that a rule has returned are kept here too."""

RULES: list[Callable[[OpOverload], Operator | None]] = []
"""Each rule returns the function for operators of its kind, and ``None`` for others. They are tried in this order."""

_on_wholes: list[OnWholes] = []

LAUNCH_NOTHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operators that launch nothing on a stream."""


def register(*overloads: OpOverload) -> Callable[[Operator], Operator]:
    """Puts the decorated function into the table, for each of these operators."""

    def put(operator: Operator) -> Operator:
        TABLE.update(dict.fromkeys(overloads, operator))
        return operator

    return put


def register_rule(rule: Callable[[OpOverload], Operator | None]) -> Callable[[OpOverload], Operator | None]:
    RULES.append(rule)
    return rule


def register_on_wholes(on_wholes: OnWholes) -> OnWholes:
    """Registers the function that runs operators on gathered tensors."""
    _on_wholes[:] = [on_wholes]
    return on_wholes


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator of which some arguments are sharded."""
    operator = TABLE.get(func)
    if operator is None:
        operator = TABLE[func] = _by_rule(func)
    if func not in LAUNCH_NOTHING:
        wait_for_host_reads()
    if _torch.is_in_backward():
        with ordered_in_backward(_devices_of_all([*args, *kwargs.values()])):
            result = _result(operator, func, args, kwargs)
    else:
        if torch.is_grad_enabled() and func not in LAUNCH_NOTHING:
            _remember_streams(_devices_of_all([*args, *kwargs.values()]))
        result = _result(operator, func, args, kwargs)
    if written_arguments(func) != WRITES_NOTHING:
        # `parameter.data` shares the parameter's shards and not its version, and below autograd torch moves no version
        # of a shard. Units look at the shards' versions: one is enough, because all shards of a tensor are written.
        written = written_values(func, args, kwargs)
        increment_version([tensor._shards[0] for tensor in written if hasattr(tensor, "_shards")])
    return result


def _result(operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return operator(func, *args, **kwargs)
    except NeedsWhole as needs:
        error = needs.error
    return _on_wholes[0](func, args, kwargs, error)


WRITES_NOTHING: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
"""What `written_arguments` returns for operators that write to no argument."""


@cache
def written_arguments(func: OpOverload) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Which arguments the operator writes to: their positions, and the names of keyword-only ones."""
    written = [
        (place, argument)
        for place, argument in enumerate(_torch.schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return (
        tuple(place for place, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written if argument.kwarg_only),
    )


def written_values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that the operator writes to, also those in lists."""
    positions, names = written_arguments(func)
    for value in (*(args[i] for i in positions if i < len(args)), *(kwargs.get(name) for name in names)):
        yield from value if isinstance(value, (list, tuple)) else [value]


def sharded_in(values: Iterable[Any]) -> Iterator[Any]:
    """All sharded tensors, also those in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from sharded_in(value)
        elif isinstance(value, torch.Tensor) and hasattr(value, "_shards"):
            yield value


def _devices_of_all(values: Iterable[Any]) -> set[torch.device]:
    return {shard.device for tensor in sharded_in(values) for shard in tensor._shards}


def _by_rule(func: OpOverload) -> Operator:
    return next(filter(None, (rule(func) for rule in RULES)), _decomposed)


def _decomposed(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Decomposes a composite operator. torch does so itself, except in inference mode."""
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NeedsWhole(refusal(func))
    return result


class NeedsWhole(Exception):
    """An operator needs more than each owner's shard, and has changed nothing. ``error``: raised if gathers are off."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def refusal(func: OpOverload, why: str = "") -> NotImplementedError:
    """The error for an operator that does not work. ``why`` completes "... does not work on sharded tensors".

    It is no ``TypeError``: torch's methods for ``+``, ``==`` and ``+=`` turn one into ``NotImplemented``. Then Python
    compares identities, or binds the name in ``plain += sharded`` to another tensor and writes nothing.
    """
    return NotImplementedError(
        f"{func} does not work on sharded tensors{why}; use full_tensor() to compute on the whole tensor"
    )


# ---- streams in a backward -------------------------------------------------------------------------------------------

# Operators run on the current streams of the owners. In a backward a thread of autograd runs them, with current streams
# of its own: only on the thread's device torch sets the stream that forward has used. So the streams of operators with
# a graph are remembered for each device. In a backward operators run on the last stream, to which the memory of their
# results then belongs. This stream waits for the other streams before an operator, and they wait for it afterwards. If
# all are default streams, there is nothing to do.

_used_streams: dict[torch.device, dict[torch.Stream, None]] = {}
"""For each device the streams of operators with a graph. torch has few streams for a device, so there are few here."""

_last_stream: dict[torch.device, torch.Stream] = {}
"""For each device the stream in `_used_streams` that was used last."""


def _remember_streams(devices: Collection[torch.device]) -> None:
    for device, stream in _streams(devices).items():
        _used_streams.setdefault(device, {})[stream] = None
        _last_stream[device] = stream


@contextmanager
def ordered_in_backward(devices: Collection[torch.device]) -> Iterator[None]:
    """Orders the launches of the block after the launches of forward on these devices, and before later launches there.

    Outside of a backward the block runs on the current streams.
    """
    if not _torch.is_in_backward():
        yield
        return
    # On the thread's own device torch has set the stream.
    to_be_set = {
        device: _last_stream[device]
        for device, here in _streams(devices).items()
        if _last_stream.get(device, here) != here and device != current_device(device)
    }
    with streams_joined(to_be_set):
        pairs = [
            (here, other)
            for device, here in _streams(devices).items()
            for other in [*_used_streams.get(device, ())]
            if other != here
        ]
        for here, other in pairs:
            Event(other).make_wait(here)
        try:
            yield
        finally:
            for here, other in pairs:
                Event(here).make_wait(other)


def _streams(devices: Collection[torch.device]) -> dict[torch.device, torch.Stream]:
    return current_streams(device for device in devices if device.type != "meta")


# ---- copies that still read shards in host memory --------------------------------------------------------------------

# Units launch copies from shards in host memory, and note events at their ends. The host waits for the events before it
# may write: before each operator that launches, and in `ShardedTensor.shards`. So no forward or backward has to wait.

MANY_HOST_READS = 64
"""At this many noted copies the ended ones are forgotten, so that they stay few if nobody writes, as in evaluation."""

_host_reads: list[Event] = []
_lock = threading.Lock()


def note_host_reads(events: Iterable[Event]) -> None:
    """Notes events at the end of copies that read shards in host memory."""
    with _lock:
        if len(_host_reads) >= MANY_HOST_READS:
            _host_reads[:] = [event for event in _host_reads if not event.has_passed()]
        _host_reads.extend(events)


def wait_for_host_reads() -> None:
    """Makes the host wait for all noted copies. Without any this costs one check.

    A copy is forgotten when it has ended. Until then other threads that call this wait for the copy too.
    """
    while _host_reads:
        with _lock:
            events = [*_host_reads]
        for event in events:
            event.synchronize()
        with _lock:
            _host_reads[:] = [event for event in _host_reads if event not in events]


@in_forked_child
def _forget_host_reads() -> None:
    """In a forked child a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _host_reads.clear()
