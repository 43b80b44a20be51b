"""Records every launch of a block, with its floating-point operations by the formulas of ``torch.utils.flop_counter``.

``torch.sim.timeline`` and ``nogpu.cuda.timeline`` call `record`.
"""

from __future__ import annotations

import functools
import os
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from nogpu.timeline.launches import Launch, Recording, StreamName
from nogpu.timeline.machine import Machine
from nogpu.timeline.schedule import Schedule, schedule

Call: TypeAlias = "tuple[list[Any], dict[str, Any], list[Any]]"
"""Positional arguments, keyword arguments and results, with a tuple of sizes for each tensor."""

# The attention that torch chooses on the CPU, and so on simulated devices. Its tensors are those of CUDA's.
SAME_FORMULA = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "aten::_scaled_dot_product_flash_attention_backward",
}


def formulas() -> dict[str, Callable[..., int]]:
    """Returns the formula of each operator that has one, by names such as ``aten::mm``. Users may register more."""
    # Its import imports Triton where that is installed, and Triton brings a free-threaded Python its lock back.
    from torch.utils import flop_counter

    kind = type(torch.ops.aten.mm)  # the registry also has operators that are no functions of a library
    registered = flop_counter.flop_registry.items()
    known = {str(key).replace(".", "::", 1): formula for key, formula in registered if isinstance(key, kind)}
    return known | {op: known[other] for op, other in SAME_FORMULA.items() if other in known}


def operations(op: str, formula: Callable[..., int], call: Call) -> int:
    """Returns the floating-point operations of one call.

    Raises:
        RuntimeError: if the formula fails, with the operator and what the formula was called with.
    """
    positional, keywords, results = (_with_tensors(values) for values in call)
    try:
        return int(formula(*positional, **keywords, out_val=results[0] if len(results) == 1 else tuple(results)))
    except Exception as error:
        raise RuntimeError(
            f"the formula for the FLOPs of {op} (torch.utils.flop_counter) failed for the arguments {call[0]} and "
            f"{call[1]}, in which a tuple is the shape of a tensor: {error}"
        ) from error


def _with_tensors(value: Any) -> Any:
    """Replaces each tuple of sizes by a tensor: a formula may ask for more than its shape."""
    if isinstance(value, tuple):
        return _tensor(value)
    if isinstance(value, list):
        return [_with_tensors(element) for element in value]
    if isinstance(value, dict):
        return {name: _with_tensors(element) for name, element in value.items()}
    return value


@functools.lru_cache(maxsize=4096)
def _tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


_open = threading.Lock()  # held by the only open block
_compiled: Any = None  # that block's extension


class Timeline:
    """What `timeline` yields. Its `recording` is there after the block."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._recording: Recording | None = None
        self._is_full = False
        self._process = os.getpid()

    @property
    def recording(self) -> Recording:
        """The launches, in the order of the host.

        Raises:
            RuntimeError: inside the block, in a forked child, or if there were more launches than ``limit``.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"a forked child does not go on with the recording of its parent: open a block of {self._name} in the "
                "child"
            )
        self._raise_if_full()
        if self._recording is None:
            raise RuntimeError(f"the launches are still being recorded: leave the block of {self._name} first")
        return self._recording

    def _raise_if_full(self) -> None:
        if self._is_full:
            raise RuntimeError(
                f"there were more than {self._limit:,} launches, and recording stopped there: pass a larger limit to "
                f"{self._name}(limit={self._limit}), or record less of the program"
            )

    def schedule(self, machine: Machine) -> Schedule:
        """When each launch would run on ``machine``. Raises as `recording` does, and as `schedule` does."""
        return schedule(self.recording, machine)


@contextmanager
def record(compiled: Any, name: str, limit: int, stacks: bool) -> Iterator[Timeline]:
    """What ``torch.sim.timeline`` does, for the devices of a compiled module; ``name`` is the user's function."""
    global _compiled
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit is a number of launches, an int; got {type(limit).__name__}")
    if limit < 1:
        raise ValueError(f"limit is a number of launches, at least 1; got {limit}")
    lock = _open  # a forked child has another one
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"{name} is recording already, and a process has one timeline at a time: leave that block first"
        )
    _compiled = compiled
    result = Timeline(limit, name)
    known = formulas()
    try:
        compiled.keep_arguments_of(list(known))
        compiled.start_recording(limit, stacks)
        try:
            yield result
        finally:
            if lock is _open:
                recorded = compiled.stop_recording()
                result._is_full = recorded.is_full
                if not result._is_full:
                    result._recording = _Reader(recorded.streams, known).read(iter(recorded.take, None))
    finally:
        lock.release()
    result._raise_if_full()


def _stop_in_child() -> None:
    # A block that is open belongs to the parent, in which perhaps another thread will leave it.
    global _open
    if _open.locked():
        _compiled.stop_recording()
    _open = threading.Lock()


os.register_at_fork(after_in_child=_stop_in_child)


Marks: TypeAlias = "Iterable[tuple[int, int]]"
"""Pairs: a stream and its tick, or a thread and a position."""


class _Reader:
    """Reads the entries of the extension in their order, and numbers what is a launch.

    An entry that is not done was no launch. What it waited for passes to the next launch of its stream or thread.
    """

    def __init__(self, streams: list[tuple[int, int]], formulas: dict[str, Callable[..., int]]) -> None:
        self._names = [StreamName(device, id) for device, id in streams]
        self._formulas = formulas
        self._streams: dict[int, int] = {}  # the extension's number, and the position in the recording
        self._threads: dict[int, int] = {}
        self._graphs: dict[int, int] = {}  # the first launch of each
        self._by_stream: defaultdict[int, _Order] = defaultdict(_Order)
        self._by_thread: defaultdict[int, _Order] = defaultdict(_Order)
        self._waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # not yet passed to a launch
        self._host_waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._issued_after: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def read(self, entries: Iterable[dict[str, Any]]) -> Recording:
        launches: list[Launch] = []
        for position, entry in enumerate(entries):
            self._waits[entry["stream"]] += entry["waits"]
            self._host_waits[entry["thread"]] += entry["host_waits"]
            self._issued_after[entry["thread"]] += entry["issued_after"]
            if entry["is_done"]:
                launches.append(self._launch(len(launches), entry))
                self._by_stream[entry["stream"]].append(entry["tick"], len(launches) - 1)
                self._by_thread[entry["thread"]].append(position, len(launches) - 1)
        return Recording(tuple(self._names[number] for number in self._streams), tuple(launches))

    def _launch(self, index: int, entry: dict[str, Any]) -> Launch:
        stream, thread, op, graph = entry["stream"], entry["thread"], entry["op"], entry["graph"]
        return Launch(
            index=index,
            op=op,
            thread=self._threads.setdefault(thread, len(self._threads)),
            in_backward=entry["in_backward"],
            stream=self._place(stream),
            bytes_read=entry["bytes_read"],
            bytes_written=entry["bytes_written"],
            flops=operations(op, self._formulas[op], entry["call"]) if entry["call"] else 0,
            dtype=str(entry["dtype"]).removeprefix("torch."),
            shapes=entry["shapes"],
            copy=entry["copy"],
            waits=_last(self._by_stream, self._waits.pop(stream), but=stream),
            joins=None if entry["joins"] is None else self._place(entry["joins"]),
            host_waits=_last(self._by_stream, self._host_waits.pop(thread)),
            issued_after=_last(self._by_thread, self._issued_after.pop(thread), but=thread),
            host_seconds=entry["host_seconds"],
            stack=entry["stack"],
            graph=self._graphs.setdefault(graph, index) if graph else None,
            peers=_in_turn(entry["peers"], self._names[stream].device),
        )

    def _place(self, stream: int) -> int:
        return self._streams.setdefault(stream, len(self._streams))


def _in_turn(peers: list[tuple[int, int, int]], device: int) -> tuple[tuple[int, int, int], ...]:
    """Each device begins with the one after it, so that no two that do the same begin with the same."""
    others = [((source + target - device), (source, target, nbytes)) for source, target, nbytes in peers]
    return tuple(peer for _, peer in sorted(others, key=lambda other: (other[0] < device, other)))


class _Order:
    """The launches of one stream or thread: a rising mark and the index of each."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        self._indices: list[int] = []

    def append(self, mark: int, index: int) -> None:
        self._marks.append(mark)
        self._indices.append(index)

    def last(self, mark: int) -> int | None:
        """Returns the last launch up to this mark. None if there is none, as for launches before the recording."""
        found = bisect_right(self._marks, mark)
        return self._indices[found - 1] if found else None


def _last(orders: dict[int, _Order], marks: Marks, but: int | None = None) -> tuple[int, ...]:
    """Returns the last launches up to these marks, without the stream or thread ``but``."""
    latest = {number: mark for number, mark in sorted(marks) if number != but}
    found = {orders[number].last(mark) for number, mark in latest.items()}
    return tuple(sorted(index for index in found if index is not None))
