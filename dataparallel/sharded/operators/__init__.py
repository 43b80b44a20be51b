"""What each ATen operator does on sharded tensors.

`run` takes every operator that has one among its arguments, below autograd: by the table, by a rule that knows its kind
(all pointwise ones, all on lists), or on whole tensors (``gathered``), which may be refused. The other files fill the
table when ``sharded`` is imported. This one imports none of them, because the tensor's class imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.comm.streams.current import Event, current_streams, streams_joined
from dataparallel.devices import current_device
from dataparallel.forks import in_forked_child

Operator: TypeAlias = Callable[..., Any]
"""Takes the operator, then its arguments as its schema has them."""

OnWholes: TypeAlias = "Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Exception], Any]"
"""Also takes the error to be raised if tensors may not be gathered."""

TABLE: dict[OpOverload, Operator] = {}
"""What single operators do. What a rule says of an operator is kept here too."""

RULES: list[Callable[[OpOverload], Operator | None]] = []
"""Functions that say what an operator of a kind does, or ``None`` if it is not of that kind. Asked in this order."""

_on_wholes: list[OnWholes] = []

LAUNCH_NOTHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operators whose current streams do not matter."""


def register(*overloads: OpOverload) -> Callable[[Operator], Operator]:
    """Puts the decorated function into the table, for each of these operators."""

    def put(operator: Operator) -> Operator:
        TABLE.update(dict.fromkeys(overloads, operator))
        return operator

    return put


def register_rule(rule: Callable[[OpOverload], Operator | None]) -> Callable[[OpOverload], Operator | None]:
    """Adds a rule."""
    RULES.append(rule)
    return rule


def register_on_wholes(on_wholes: OnWholes) -> OnWholes:
    """Has this function run operators that need whole tensors."""
    _on_wholes[:] = [on_wholes]
    return on_wholes


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result on arguments some of which are sharded.

    Raises:
        TypeError: the operator does not work on sharded tensors, or not on these.
        ValueError: the sharded tensors have different owners or placements.
    """
    operator = TABLE.get(func)
    if operator is None:
        operator = TABLE[func] = _of_kind(func)
    if func not in LAUNCH_NOTHING:
        wait_for_host_reads()
    if _torch.is_in_backward():
        with ordered_in_backward(_places([*args, *kwargs.values()])):
            return _result(operator, func, args, kwargs)
    if torch.is_grad_enabled() and func not in LAUNCH_NOTHING:
        _remember_streams(_places([*args, *kwargs.values()]))
    return _result(operator, func, args, kwargs)


def _result(operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return operator(func, *args, **kwargs)
    except NeedsWhole as needs:
        error = needs.error
    return _on_wholes[0](func, args, kwargs, error)


def _places(values: Iterable[Any]) -> set[torch.device]:
    """Where the parts of the sharded tensors are, also of those in lists."""
    found: set[torch.device] = set()
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= _places(value)
        elif isinstance(value, torch.Tensor):
            found.update(shard.device for shard in getattr(value, "_shards", ()))
    return found


def _of_kind(func: OpOverload) -> Operator:
    return next(filter(None, (rule(func) for rule in RULES)), _made_of_others)


def _made_of_others(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Under inference mode operators that torch makes of others arrive whole."""
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NeedsWhole(refusal(func))
    return result


class NeedsWhole(Exception):
    """An operator needs more than each owner has, and has changed nothing. ``error``: raised if nothing may gather."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def refusal(func: OpOverload, why: str = "") -> TypeError:
    """The error for an operator that does not work. ``why`` completes "... does not work on sharded tensors"."""
    return TypeError(f"{func} does not work on sharded tensors{why}; use full_tensor() to compute on the whole tensor")


# ---- streams in a backward -------------------------------------------------------------------------------------------

# Operators run on the current streams of the owners. In a backward a thread of autograd runs them, whose current
# streams are its own: torch sets only that of the thread's device to the one that forward has used. So the streams of
# operators with a graph are remembered, and in a backward operators run on the last of them, where the memory of their
# results then belongs. It waits for the others before an operator, and they for it afterwards. If all are default
# streams, there is nothing to do.

_used: dict[torch.device, dict[torch.Stream, None]] = {}
"""For each device the streams of operators with a graph. torch has few for a device, so they stay few."""

_last: dict[torch.device, torch.Stream] = {}
"""Of these the one that was used last."""


def _remember_streams(devices: Collection[torch.device]) -> None:
    for device, stream in _streams(devices).items():
        _used.setdefault(device, {})[stream] = None
        _last[device] = stream


@contextmanager
def ordered_in_backward(devices: Collection[torch.device]) -> Iterator[None]:
    """The block runs after what forward has launched on the devices, and before what is launched there after it.

    Outside of a backward it runs on the current streams.
    """
    if not _torch.is_in_backward():
        yield
        return
    # On the thread's own device torch has set the stream.
    to_be_set = {
        device: _last[device]
        for device, here in _streams(devices).items()
        if _last.get(device, here) != here and device != current_device(device)
    }
    with streams_joined(to_be_set):
        pairs = [
            (here, other)
            for device, here in _streams(devices).items()
            for other in [*_used.get(device, ())]
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

# Units launch copies to devices, and note when they end. Before the host writes to a shard, it waits: before each
# operator that launches something, and in `ShardedTensor.shards`. So neither a forward nor a backward has to wait.

MANY_HOST_READS = 64
"""So many copies are noted before those are forgotten that have ended, where nobody writes, as in evaluation."""

_host_reads: list[Event] = []
_lock = threading.Lock()


def note_host_reads(events: Iterable[Event]) -> None:
    """Copies that end at these events read shards in host memory."""
    with _lock:
        if len(_host_reads) >= MANY_HOST_READS:
            _host_reads[:] = [event for event in _host_reads if not event.has_passed()]
        _host_reads.extend(events)


def wait_for_host_reads() -> None:
    """Makes the host wait for the copies that were noted. Without any that is one question.

    A copy is forgotten when it has ended: until then other threads that call this wait for it too.
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
